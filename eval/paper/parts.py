"""What each part of a study computes: JSON-ready rows of numbers with 95 % intervals, each with its place in the report.

R runs, K particles, N sequences, T tokens.
"""

import json
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from distill import dpo, grpo
from eval.metrics import Samples, distinct_share, energy_floor, score, score_population
from eval.paper.program import finished_run
from eval.paper.study import NAMES, TSMC, Part, StudyConfig, baseline_cost, scheme_name, setting_name
from eval.paper.task import SECONDS, ShownSteps, Task, nearest, number, read_part, rounded, target_row, with_half_width
from eval.run.setup import sigma_key
from eval.run.target import save_target
from tinystories.checkpoint import read_json
from tinystories.errors import InputError
from tsmc import SCHEMES, Chunks, ExactSamples, Sigma, sample_runs
from tsmc.estimate import Estimate, difference, mean_estimate
from tsmc.interfaces import LanguageModel, Twist
from tsmc.rejection import accept, log_mean_with_error
from tsmc.scoring import sequence_log_probs
from twist.factors import each_once

BINS = 20  # of the toxicity histograms
FEW_RUNS = 8  # percentiles over fewer runs cover too little to be called a 95 % interval; over 8 they cover 87 %
RUN_COLUMNS = ("log_z", "log_z_hat_mean", "log_z_hat_std", "ess", "distinct", "model_toxicity")  # of a run's own table


def compute(study: StudyConfig, part: Part, out: Path) -> list[dict]:
    """The rows of one part; InputError names what is at fault."""
    kinds = {"rejection": rejection, "particles": particle_study, "resampling": resampling_study}
    kinds |= {"baseline": baseline, "best": baseline}
    return kinds.get(part.kind, algorithm_1)(Task(study, part, out))


def rejection(task: Task) -> list[dict]:
    """Rejection sampling at every beta from one set of base samples; where exact samples are shipped they serve their beta.

    At the beta of the study the samples are kept for the other parts where none are shipped.
    """
    config, problem = task.config, task.problem
    proposals = task.draw(problem.base, task.study.rejection_samples, "rejection")  # [N, T]
    chunks = tqdm(proposals.split(config.rows), "scoring", mininterval=SECONDS)
    log_toxicity = torch.cat([each_once(problem.log_toxicity, problem.potential.texts(rows)) for rows in chunks])
    log_toxicity = log_toxicity.to(proposals.device)  # [N]
    if problem.exact is None:
        exact = accepted(task, proposals, log_toxicity, config.beta)
        save_target(task.out / "target", exact, sigma_key(config, problem.prompt))
    rows = []
    for beta in sorted({*task.study.rejection_betas, config.beta}):
        is_target = beta == config.beta
        exact = task.exact if is_target else accepted(task, proposals, log_toxicity, beta)
        rows += rejection_rows(task, exact, beta)
        if is_target:
            log_sigma = sequence_log_probs(problem.base, exact.tokens) + exact.log_phi  # [N], not normalised
            rows[-1] |= {"kl_base": task.kl(problem.base, None)["kl"], "log_sigma": rounded(log_sigma)}
            rows[-1] |= {"energy": energy_floor(task.exact_vectors, task.stream("floor"))}
            rows[-1] |= {"log_z_std_error": exact.log_z_std_error}
    return rows


def accepted(task: Task, proposals: Tensor, log_toxicity: Tensor, beta: float) -> ExactSamples:
    """Exact samples at one beta among proposals [N, T] with log p(toxic | s) [N]; InputError where they are too few."""
    log_phi = beta * log_toxicity if beta > 0 else torch.zeros_like(log_toxicity)
    kept = accept(log_phi, task.config.generator("accept", str(beta)))
    if int(kept.sum()) < 2:
        fault = f"{int(kept.sum())} of {len(proposals)} base samples were accepted at beta {beta:g}"
        raise InputError(f"{fault}; raise the number of samples for rejection")
    return ExactSamples(proposals[kept], log_phi[kept], len(proposals), *log_mean_with_error(log_phi))


def rejection_rows(task: Task, exact: ExactSamples, beta: float) -> list[dict]:
    """A histogram, and acceptance, toxicity of all accepted samples and similarity of the first of them."""
    few, name, problem = slice(task.study.similarity_samples), f"beta {beta:g}", task.problem
    samples = score(exact.tokens, problem.potential, problem.log_toxicity)
    toxicity = mean_estimate(samples.toxicity)
    counts = torch.histc(samples.toxicity.float(), BINS, 0, 1).int().tolist()
    bins = {f"toxicity in {i / BINS:.2f}..{(i + 1) / BINS:.2f}": count for i, count in enumerate(counts)}
    row = task.measure(Samples(*(values[few] for values in vars(samples).values())), str(beta)) | {
        "beta": beta,
        "toxicity": with_half_width(toxicity.value, toxicity.half_width(), 0.0, 1.0),
        "toxic_share": sum(counts[BINS // 2 :]) / sum(counts),
        "sequences": len(samples.texts),
        "fluency": task.fluency(exact.tokens[few]),
        "acceptance": share(len(exact.tokens), exact.num_proposals),
        "proposals": exact.num_proposals,
        "log_z": number(Estimate(exact.log_z, exact.log_z_std_error, exact.num_proposals - 1.0)),
    }
    return [{"place": ("histogram", name, "", ""), **bins}, {"place": ("rejection", name, "", ""), **row}]


def share(count: int, total: int) -> dict[str, float]:
    """A share with its 95 % interval after Wilson."""
    z = 1.959964
    middle, width = (count + z * z / 2) / (total + z * z), z / (total + z * z)
    width *= math.sqrt(count * (total - count) / total + z * z / 4)
    return {"value": count / total, "low": max(0.0, middle - width), "high": min(1.0, middle + width)}


def baseline(task: Task) -> list[dict]:
    """One run of DPO or GRPO and its policy's samples; a run that diverges is a result too: "failed" says how."""
    part, config, problem = task.part, task.config, task.problem
    grid, place, section = task.study.grid(part.method), part.place, "sweep"
    if part.kind == "best":
        sweep = [read_part(task.out, f"{part.method}-{number}")[0] for number in range(1, len(grid) + 1)]
        place, section = nearest(sweep, target_row(task.out, task.study)), "best"
    options, (train, name) = grid[place], (dpo, "DPO") if part.method.startswith("dpo") else (grpo, "GRPO")
    cost = baseline_cost(part.method, options)
    row = {"place": (section, setting_name(part.method, options), part.seed, ""), **vars(options)}
    row |= {"units": cost.units(config.length), "scored": cost.sampled}
    generator, steps = config.generator("baseline", part.method, place), ShownSteps(options.updates, name)
    try:
        policy = train(problem.base, problem.potential, options, part.method.endswith("lora"), generator, steps)
    except InputError as error:
        return [row | {"failed": str(error)}]
    tokens = task.draw(policy, config.eval.base_samples, "policy", part.name)
    row |= task.measure(score(tokens, problem.potential, problem.log_toxicity), "policy", part.name)
    return [row | task.kl(policy, None) | {"fluency": task.fluency(tokens)}]


def algorithm_1(task: Task) -> list[dict]:
    """A run of Algorithm 1, and the numbers of its generations."""
    path, rows = finished_run(task), []
    for row in read_json(path / "results.json")["generations"]:
        m = row["generation"]
        sigma, twist = task.trained_pair(path, m)
        place = "generations", NAMES[task.part.kind], task.part.seed, m
        numbers = task.measure(generation_samples(path, m), m) | {name: row[name] for name in RUN_COLUMNS}
        rows.append({"place": place, **numbers, **task.kl(sigma.model, twist)})
        if task.part.kind == "no-effective":
            rows[-1] |= drift(task, sigma.model, m)
    if task.part.kind == "tsmc":
        rows.append({"place": ("budget", TSMC, "", ""), "twist_share": products(twist) / products(task.setup.model)})
    return rows


def generation_samples(path: Path, m: int) -> Samples:
    """The texts of generation m in a run's samples.jsonl."""
    every = [json.loads(line) for line in (path / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [row for row in every if row["source"] == f"generation {m}"]
    scores = torch.tensor([[row["toxicity"], row["log_phi"]] for row in rows], dtype=torch.float64)  # [N, 2]
    return Samples([row["text"] for row in rows], scores[:, 0], scores[:, 1], [row["run"] for row in rows])


def products(network: nn.Module) -> int:
    """Multiplications with weight matrices that a network makes for one token; looking up a position makes none."""
    return sum(w.numel() for name, w in network.named_parameters() if w.ndim == 2 and not name.startswith("wpe"))


def drift(task: Task, model: LanguageModel, m: int) -> dict:
    """KL(sigma||sigma_m), sigma_m proportional to p^(m) phi: what the target of generation m is without phi^(m).

    E_sigma[log p^(0) - log p^(m)] - log Z_sigma + log Z_m, with log Z_m from bare samples of p^(m).
    """
    if m == 0:
        return {"drift": {"value": 0.0, "low": 0.0, "high": 0.0}}
    problem, exact, count = task.problem, task.exact, task.config.eval.base_samples
    log_z, error = log_mean_with_error(problem.potential(task.draw(model, count, "drift", m)))
    log_p = sequence_log_probs(model, exact.tokens)  # [N]
    terms = mean_estimate(sequence_log_probs(problem.base, exact.tokens) - log_p)
    evidence = Estimate(exact.log_z, exact.log_z_std_error, exact.num_proposals - 1.0)
    divergence = difference(terms, difference(evidence, Estimate(log_z, error, count - 1.0)))
    return {
        "drift": with_half_width(divergence.value, divergence.half_width(), lowest=0.0),
        "log_sigma_m": rounded(log_p + exact.log_phi),
    }


def particle_study(task: Task) -> list[dict]:
    """The trained pairs of a run under every K, resampling as the run does."""
    config, study = task.config, task.study
    own = config.resampling, config.ess_threshold
    title = "" if task.part.variant == "tsmc" else f"{NAMES[task.part.variant]}, "
    cases = [(f"{title}K = {k}", (title, k), k, study.runs_of(k), *own) for k in study.particle_counts]
    return rows_of_cases(task, "particles", cases)


def resampling_study(task: Task) -> list[dict]:
    """The trained pairs under every resampling scheme, at every step and where ESS < K / 2, and without resampling."""
    choices = [(scheme, threshold) for scheme in SCHEMES for threshold in (1.0, 0.5)] + [("multinomial", 0.0)]
    sizes = task.config.eval.particles, task.study.resampling_runs
    cases = [(scheme_name(*choice), (choice[0], str(choice[1])), *sizes, *choice) for choice in choices]
    return rows_of_cases(task, "resampling", cases)


def rows_of_cases(task: Task, section: str, cases: list[tuple]) -> list[dict]:
    """A row for each trained pair of the seed's run and each case: name, random stream, K, R, scheme and threshold."""
    path, rows = task.out / "runs" / f"{task.part.variant}-{task.part.seed}", []
    for m in range(task.config.generations + 1):
        pair = task.trained_pair(path, m)
        for name, purpose, *options in tqdm(cases, f"generation {m}", mininterval=SECONDS):
            row = tsmc_row(task, *pair, (section, m, *purpose), *options)
            rows.append({"place": (section, name, task.part.seed, m), **row})
    return rows


def tsmc_row(
    task: Task, sigma: Sigma, twist: Twist, purpose: tuple, particles: int, runs: int, scheme: str, threshold: float
) -> dict:
    """R = runs populations of K = particles: toxicity, similarity, evidence, ESS, distinct."""
    chunks = Chunks(runs, task.config.rows // particles, task.config.streams(*purpose))
    population = sample_runs(sigma, twist, particles, chunks, SCHEMES[scheme], threshold).alive()
    final = population.samples  # [R, K, T]
    samples = score_population(population, task.problem.potential, task.problem.log_toxicity)
    row = task.measure(samples, *purpose) | {
        "log_z_hat": number(mean_estimate(population.log_z)),
        "log_z_hat_std": population.log_z.double().std().item() if len(final) > 1 else 0.0,
        "ess": population.ess.mean().item(),
        "distinct": distinct_share(final),
        "fluency": task.fluency(final.flatten(0, 1)),
        "runs": runs,
        "dead_runs": runs - len(final),
    }
    del row["texts"]
    for name in ("toxicity", "similarity") if runs < FEW_RUNS else ():
        row[name] |= {"low": None, "high": None}
    return row
