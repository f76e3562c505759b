"""The rows of a job's table: Base, Target and generations (`eval/metrics.py` has the columns)."""

import math
from functools import partial

import torch

from distill import Learner, Pair, Pooled
from eval import metrics
from eval.command import say
from eval.job import Job
from eval.world import SAMPLES, World, check_unchanged, checked_rows, save_target
from tinystories.files import write_tensors
from tsmc import processes
from tsmc.estimate import log_mean_estimate
from tsmc.proposal import proposal_log_probs, sample_proposal, sequence_log_probs
from tsmc.rejection import exact_samples
from tsmc.sampler import Population, threshold_of
from tsmc.sigma import call_potential

EXAMPLES = 3  # texts of a row that are shown when the job ends
ENOUGH = 200  # exact samples of the target
FEW = 10  # base samples with phi > 0; from fewer little can be learned


def evaluate(job: Job, world: World, learner: Learner, pair: Pair, m: int) -> tuple[dict, list]:
    """The row of generation m, and its texts, ready for JSON."""
    check_unchanged(job.path, world)  # since the last row
    options, sigma = job.options, learner.sigma(pair.model)
    particles, runs = options.eval_particles[0], options.eval_runs
    row = {"generation": m, "scores": learner.scored(m)}
    if learner.samples_policy:
        samples, log_weights = score_policy(job, world, learner, pair, m)
        row["weighted_score"] = metrics.weighted_score(log_weights, samples)
        is_independent = True
    else:
        population = learner.population(pair, "evaluation", m, particles, runs)
        samples = score_population(world, population)
        row |= metrics.population_row(population)
        log_weights = population.log_weights
        is_independent = threshold_of(sigma, learner.rule(options.learning)) == 0
        if line := metrics.warning_of(row, job.row(None)):
            say(line)
    if world.reference is not None:
        tokens = world.reference.exact.tokens  # [N, T]
        log_p, log_q = proposal_log_probs(pair.model, pair.twist, tokens)  # [N], [N]
        row |= world.kl_row(log_q)
        row["kl_target_model"] = world.reference.kl_to(log_p).value  # without its twist
        if is_independent:  # the law of a sample: of a text that a run of K draws resamples at T
            log_w = log_p + call_potential(sigma.log_potential, tokens, log_p) - log_q
            log_law = log_q + metrics.log_law_of_samples(log_w, log_weights)
            row["kl_samples"] = world.reference.kl_to(log_law).value
    row |= world.describe(samples)
    source = torch.Generator().manual_seed(options.seed)
    places = torch.randperm(len(samples.texts), generator=source)[:EXAMPLES]
    row["examples"] = [samples.texts[n] for n in places]
    if len(options.eval_particles) > 1 and not learner.samples_policy:
        row["populations"] = scores_by_size(job, world, learner, pair, m)
    return row, samples.rows(f"generation {m}")


def scores_by_size(
    job: Job, world: World, learner: Learner, pair: Pair, m: int
) -> dict[int, float]:
    """The mean score of populations of different K, with equally many particles (Fig. 2)."""
    found = {}
    for particles in job.options.eval_particles:
        word, runs = f"populations of {particles}", max(1, job.options.row_size() // particles)
        population = learner.population(pair, word, m, particles, runs)
        found[particles] = score_population(world, population).score.mean().item()
    return found


def score_population(world: World, population: Population) -> metrics.ScoredTexts:
    """The samples of the runs that are alive, grouped by their runs."""
    final = population.alive().samples  # [R, K, T]
    group = [r for r in range(len(final)) for _ in range(final.shape[1])]  # [R K]
    return world.score(final.flatten(0, 1), group)


def score_policy(
    job: Job, world: World, learner: Learner, pair: Pair, m: int
) -> tuple[metrics.ScoredTexts, torch.Tensor]:
    """All texts of a policy, those with phi = 0 as well, and the weights [R, K] that they would
    have as runs of K = eval_particles."""
    options = job.options
    draw = partial(sample_proposal, pair.model, None)
    drawn = learner.streams.draw("evaluation", m, options.row_size(), draw)
    samples = world.score(drawn["tokens"])
    log_p = sequence_log_probs(world.base, drawn["tokens"])  # [N]
    log_phi = samples.scores["log_phi"].to(log_p)
    log_weights = log_p + log_phi - drawn["log_p"].sum(1)  # [N] of sigma against the policy
    return samples, log_weights.view(options.eval_runs, -1)


def evaluate_ends(job: Job, world: World, learner: Learner) -> None:
    """The rows Base and Target, where p^(0) and sigma stand; measured once in a job."""
    if job.has(None):
        return
    count = job.options.row_size()
    draw = partial(sample_proposal, world.base, None)
    drawn = learner.streams.draw("base samples", None, count, draw)
    base = world.score(drawn["tokens"])
    log_phi = base.scores["log_phi"]  # [N]
    tell_rate(world, learner, int((log_phi > -math.inf).sum()), count)
    if world.reference is None and job.options.eval_target_proposals > 0:
        find_exact_samples(job, world, learner, log_phi.exp().mean().item())
    log_z = log_mean_estimate(log_phi)
    row = world.describe(base) | {"log_z": log_z.value, "log_z_std_error": log_z.std_error}
    row |= {"num_samples": count, "examples": base.texts[:EXAMPLES]}
    rows, samples = {"base": row}, base.rows("base")
    if world.reference is not None:
        row |= world.kl_row(world.reference.log_p)
        target = world.score(world.reference.exact.tokens)
        rows["target"] = target_row(world, target, count)
        samples += target.rows("target")
    if processes.rank() == 0:
        tensors = {"tokens": drawn["tokens"], "log_p": drawn["log_p"].sum(1), "log_phi": log_phi}
        tensors["vectors"] = world.encode([base.texts[n] for n in checked_rows(log_phi)])
        write_tensors(job.folder(None) / SAMPLES, tensors)
    job.keep(None, rows, samples, learner)


def tell_rate(world: World, learner: Learner, alive: int, count: int) -> None:
    """Say where p^(0) hardly ever meets a hard potential, and what that means for the learner."""
    hints = world.potential.hints
    if hints and isinstance(learner, Pooled):
        say("half of the first draws are forced to hold a hint of the potential")
    elif alive < min(FEW, count):
        remedy = "use --learner pooled" if hints else "use --learner pooled and hints"
        rate = f"{alive} of {count} base samples have phi > 0, which is little to learn from"
        say(f"{rate}; {remedy}, or soften the potential (docs/potentials.md)")


def find_exact_samples(job: Job, world: World, learner: Learner, rate: float) -> None:
    """Draw exact samples of sigma by rejection, if there are enough, and keep them in the job.

    The mean of phi over base samples tells beforehand how many proposals are needed.
    """
    proposals = job.options.eval_target_proposals
    if rate > 0:
        proposals = min(proposals, math.ceil(ENOUGH / rate))
    word = "target by rejection"
    exact = exact_samples(world.base, world.potential, learner.streams, word, proposals)
    if len(exact.tokens) < 2:
        fault = f"{len(exact.tokens)} of {proposals} base samples were accepted"
        say(f"{fault}, so there is no row Target and no KL; raise --eval-target-proposals")
        return
    world.set_exact(exact)
    if processes.rank() == 0:
        save_target(job.path / "target", world, job.options)


def target_row(world: World, samples: metrics.ScoredTexts, count: int) -> dict:
    """Row Target of the exact samples; `count` is how many texts a generation's row has."""
    exact, vectors = world.reference.exact, world.reference.vectors
    row = metrics.describe(samples, vectors)
    if len(vectors) >= 4:  # two in each half
        row["energy"] = metrics.energy_floor(vectors, count)
    row |= {"log_z": exact.log_z, "log_z_std_error": exact.log_z_std_error}
    return row | {"num_samples": len(exact.tokens), "num_proposals": exact.num_proposals}
