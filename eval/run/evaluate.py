"""The rows of a run's table: Base, Target and generations (`eval/metrics.py` has the columns)."""

import math
from functools import partial

import torch
from torch import Tensor, nn

import tinystories
from distill.pooled import Pooled
from distill.published import Published
from eval import metrics
from eval.run.options import RunConfig
from eval.run.progress import Place
from eval.run.run import Run
from eval.run.setup import Setup, save_target, sigma_key
from tinystories.errors import InputError
from tsmc.interfaces import LanguageModel
from tsmc.proposal import sample_proposal
from tsmc.rejection import ExactSamples, draw_accepted, exact_samples
from tsmc.runs import Phases, draw_population
from tsmc.sampler import Population, Sigma
from twist.pair import Pair, save_pair
from twist.potential import seen_from

EXAMPLES = 3  # texts of a row that are shown when the run ends
ENOUGH = 200  # exact samples of the target
TARGET = ("target by rejection", None)


def draw_model(phases: Phases, phase: str, model: LanguageModel, count: int) -> Tensor:
    """Independent samples [N, T] of a bare model for the table, N = count."""

    def draw(size: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {"tokens": sample_proposal(model, None, size, generator).tokens}

    return phases.draw(phase, None, count, draw)["tokens"]


def plan(learner: Published | Pooled, setup: Setup, config: RunConfig) -> dict[Place, float]:
    """The phases of a run in their order, and about how many sequences could be drawn in each."""
    phases: dict[Place, float] = {("base samples", None): config.eval_base_samples}
    if setup.exact is None and config.eval_target_proposals:
        phases[TARGET] = config.eval_target_proposals
    for m in range(config.generations + 1):
        phases |= {(phase, m): work for phase, work in learner.plan(m).items()}
        phases["evaluation", m] = 2.0 * config.eval_runs * config.eval_particles
    return phases


def draw_target(
    run: Run, setup: Setup, config: RunConfig, base_log_phi: Tensor
) -> ExactSamples | None:
    """Exact samples of sigma, drawn by rejection and kept in the run; None where there are none.

    log phi [N] of base samples tells, before they are drawn, how many proposals are needed.
    """
    proposals = config.eval_target_proposals
    if proposals == 0:
        return None
    rate = base_log_phi.exp().mean().item()
    proposals = min(proposals, math.ceil(ENOUGH / rate) if rate > 0 else proposals)
    run.progress.plan[TARGET] = proposals
    expected = f"about {proposals * rate:.0f} exact samples of the target"
    run.say(f"drawing {proposals} base samples for {expected}", is_progress=True)
    draw = partial(draw_accepted, setup.base, setup.potential)
    exact = exact_samples(run.draw(*TARGET, proposals, draw))
    if len(exact.tokens) < 2:
        fault = f"{len(exact.tokens)} of {proposals} base samples were accepted"
        run.say(f"{fault}, so there is no row Target and no KL; raise --eval-target-proposals")
        return None
    if run.writes:
        save_target(run.path / "target", exact, sigma_key(config))
    return exact


def evaluate_ends(run: Run, setup: Setup, config: RunConfig) -> dict:
    """The results with their rows Target and Base: where sigma and p^(0) stand."""
    results = {"prompt": config.prompt, "potential": list(config.potential)}
    base = setup.base
    tokens = draw_model(run, "base samples", base, config.eval_base_samples)
    samples = setup.score(tokens)
    check_base_rate(run, config, samples.scores["log_phi"])
    if setup.exact is None:
        setup.exact = draw_target(run, setup, config, samples.scores["log_phi"])
    if setup.exact is not None:
        particles = config.eval_runs * config.eval_particles
        results["target"], exact = evaluate_target(setup, particles)
        run.add_samples(exact.rows("target"))
    results["base"] = metrics.describe(samples, setup.encode(samples.texts), setup.exact_vectors)
    results["base"]["examples"] = samples.texts[:EXAMPLES]
    run.add_samples(samples.rows("base"))
    return results | {"generations": []}


def evaluate_target(setup: Setup, particles: int) -> tuple[dict, metrics.Samples]:
    """Row `target`: the exact samples; `particles` is how many samples a generation's row has."""
    exact = setup.exact
    samples = setup.score(exact.tokens)
    vectors = setup.exact_vectors = setup.encode(samples.texts)
    row = metrics.describe(samples, vectors)
    if len(vectors) >= 4:  # two in each half
        row["energy"] = metrics.energy_floor(vectors, particles)
    row |= {"log_z": exact.log_z, "log_z_std_error": exact.log_z_std_error}
    row |= {"num_samples": len(exact.tokens), "num_proposals": exact.num_proposals}
    return row, samples


def check_base_rate(run: Run, config: RunConfig, log_phi: Tensor) -> None:
    """Say how often p^(0) meets a hard potential; InputError where CTL would hardly ever see it."""
    alive = (log_phi > -math.inf).sum().item()
    total = len(log_phi)
    if alive == total:
        return
    is_pooled = config.learner == "pooled"
    batch = config.pool_first_draws if is_pooled else config.ctl_batch_size
    flag = "--pool-first-draws" if is_pooled else "--ctl-batch-size"
    seen = batch * alive / total
    strength = math.ceil(math.log(total / max(alive, 1)))
    remedy = f"soften the potential (~{strength} behind its name), or raise {flag}"
    remedy = remedy if is_pooled else f"add --learner pooled, {remedy}"
    rate = f"{alive} of {total} base samples have phi > 0"
    line = f"{rate}: about {seen:.1f} of the {batch} that the twist first sees"
    run.say(f"{line}; {remedy}" if seen < 10 else line)  # hardly anything to learn from
    if not is_pooled and seen < 0.5:
        raise InputError(f"{rate}, too few to learn from; {remedy}")


def evaluate_generation(
    setup: Setup, sigma: Sigma, twist: nn.Module | None, m: int, population: Population
) -> tuple[dict, metrics.Samples]:
    """The row of generation m: TSMC runs, and KL(sigma||q). Dead runs have no samples."""
    runs = len(population.log_z)
    log_z, log_z_half_width = metrics.log_mean_z(population.log_z)
    population = population.alive()
    final = population.samples
    group = torch.arange(len(final)).repeat_interleave(final.shape[1]).tolist()  # [R K] its run
    samples = setup.score(final.flatten(0, 1), group)
    distinct = [len(run.unique(dim=0)) / len(run) for run in final]  # [R]
    row = {
        "generation": m,
        **metrics.describe(samples, setup.encode(samples.texts), setup.exact_vectors),
        "log_z": log_z,
        "log_z_hat_mean": population.log_z.mean().item(),
        "log_z_hat_std": population.log_z.std().item() if len(final) > 1 else math.nan,
        "ess": population.ess.mean().item(),
        "distinct": sum(distinct) / len(distinct),
        # Texts of dead runs were scored as well.
        "worth": 1 / population.shares().square().sum().item() / (runs * final.shape[1]),
        "dead_runs": runs - len(population.log_z),
        "num_runs": runs,
    }
    if row["log_z_hat_std"] <= metrics.WIDEST:
        row["log_z_half_width"] = log_z_half_width
    if setup.exact is not None:
        base = setup.base
        kl, _ = metrics.kl_target_proposal(sigma.model, twist, base, setup.exact)
        row |= {"kl_target_proposal": kl.value, "kl_half_width": kl.half_width()}
    return row, samples


def finish_generation(
    run: Run, setup: Setup, config: RunConfig, m: int, pair: Pair, results: dict
) -> None:
    """Save (p^(m), psi^(m)), measure it, and add its row to the results."""
    if run.writes:
        write = partial(tinystories.save, tokenizer=setup.tokenizer)
        save_pair(run.path / f"generation-{m}", pair, setup.base, write)
    sigma = seen_from(pair.model, setup.base, setup.potential, config.keeps_sigma())
    twist = pair.twist
    sizes = (config.eval_particles, config.eval_runs)
    population = draw_population(run, "evaluation", m, sigma, twist, *sizes, **config.rule())
    row, samples = evaluate_generation(setup, sigma, twist, m, population)
    source = torch.Generator().manual_seed(run.seed)
    shares = population.shares().flatten()  # [R K] of the weight of all runs
    chosen = torch.multinomial(shares, EXAMPLES, replacement=True, generator=source)
    row["examples"] = setup.potential.texts(population.tokens.flatten(0, 1).cpu()[chosen])
    if row["ess"] < 2:
        fault = f"generation {m}: one particle has nearly all the weight of a run"
        run.say(f"{fault}; lower the learning rate, draw more, or soften the potential")
    run.add_samples(samples.rows(f"generation {m}"))
    if row["dead_runs"] > config.eval_runs / 10:
        fault = f"generation {m}: {row['dead_runs']} of {config.eval_runs} runs died"
        run.say(f"{fault}, all weights zero; raise --eval-particles, or soften the potential")
    results["generations"].append(row)
