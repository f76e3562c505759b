"""What each part of the study computes: numbers with 95 % intervals, and texts with their scores, as one JSON-ready object.

A number is {"value", "low", "high"}. Toxicity and similarity of TSMC samples have bootstrap intervals over whole runs
(`eval.bootstrap`). A part draws from random streams named after itself, so its numbers depend on no other part's timing.
"""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch

import tinystories
from config import RunConfig
from distill import dpo, grpo
from eval.bootstrap import bootstrap, run_sums
from eval.evaluate import (
    Samples,
    distinct_share,
    evaluate_base,
    evaluate_target,
    kl_target_proposal,
    sample_model,
    sample_tsmc,
    score,
)
from eval.figures import draw_figures
from eval.ingredients import Ingredients, Problem, identity, load_ingredients, sigma_key
from eval.run import RunDirectory
from eval.study import Part, StudyConfig, cost_of
from eval.target import Target, load_target, save_target
from main import self_distilled_tsmc
from tinystories import Conditional, InputError
from tinystories.checkpoint import read_json, replacing
from tinystories.phase import Phase
from tsmc import SCHEMES, sample_proposal
from tsmc.estimate import Estimate, difference, mean_estimate
from tsmc.proposal import sequence_log_probs
from tsmc.rejection import accept, log_mean_with_error
from tsmc.sampler import Sigma
from twist import TwistMLP, load_twist
from twist.potential import each_once

BINS = 20  # of the toxicity histograms
SHARED = {  # phases of variants that are those of the run itself: the variants take them over instead of repeating them
    "no-effective": ("0-twist-learning", "0-evaluation", "1-sampling", "1-distillation"),
    "lora": ("0-twist-learning", "0-evaluation", "1-sampling"),
}


def compute(study: StudyConfig, part: Part, out: Path) -> dict:
    """The numbers and texts of one part; InputError names what is at fault."""
    config = study.seeded(part.seed, part.kind, str(out / "runs" / part.name))
    given = load_ingredients(config)
    if part.kind == "rejection":
        return rejection(study, config, given, out)
    given.problems[0].target = target_of(config, given.problems[0], out)
    if part.kind in ("tsmc", *SHARED):
        return whole_run(study, config, given, part, out)
    if part.kind in ("particles", "resampling"):
        sweep = particle_study if part.kind == "particles" else resampling_study
        return sweep(study, config, given, out / "runs" / f"tsmc-{part.seed}")
    return baseline(study, config, given, part, out)


def target_of(config: RunConfig, problem: Problem, out: Path) -> Target:
    """The shipped samples of sigma, or those that the rejection part has drawn."""
    target = problem.target or load_target(out / "target", sigma_key(config, problem.prompt))
    if target is None:
        raise InputError(f"{out / 'target'}: made for other options; choose another --out")
    return target.to(problem.base.prompt.device)


def number(estimate: Estimate) -> dict[str, float]:
    """Value and 95 % interval of an estimate."""
    return {"value": estimate.value, "low": estimate.quantile(0.025), "high": estimate.quantile(0.975)}


def stream(config: RunConfig, *purpose: str | int) -> torch.Generator:
    """A random stream on the CPU, where texts are drawn and intervals are computed."""
    return torch.Generator().manual_seed(config.generator(*purpose).initial_seed())


def measure(study: StudyConfig, config: RunConfig, given: Ingredients, samples: Samples, *purpose: str | int) -> dict:
    """Toxicity, similarity, histogram and a few texts, drawn without selection, of a set of texts."""
    sums = run_sums(samples.toxicity, given.encode(samples.texts), samples.group)
    drawn = torch.randperm(len(samples.texts), generator=stream(config, "texts", *purpose))[: study.texts].tolist()
    return {
        **bootstrap(sums, study.replicates, stream(config, "bootstrap", *purpose)),
        "sequences": len(samples.texts),
        "histogram": torch.histc(samples.toxicity.float(), BINS, 0, 1).int().tolist(),
        "texts": [{"toxicity": samples.toxicity[i].item(), "text": samples.texts[i]} for i in drawn],
    }


def share(count: int, total: int) -> dict[str, float]:
    """A share with its 95 % interval after Wilson."""
    z = 1.959964
    middle, width = (count + z * z / 2) / (total + z * z), z / (total + z * z)
    width *= math.sqrt(count * (total - count) / total + z * z / 4)
    return {"value": count / total, "low": max(0.0, middle - width), "high": min(1.0, middle + width)}


def kl(model: Conditional, twist: TwistMLP | None, base: Conditional, target: Target) -> dict[str, float]:
    """KL(sigma||q), for a bare model KL(sigma||p)."""
    value, half = kl_target_proposal(model, twist, base, target)
    return {"value": value, "low": value - half, "high": value + half}


def rejection(study: StudyConfig, config: RunConfig, given: Ingredients, out: Path) -> dict:
    """Rejection sampling at every beta from one set of base samples; where exact samples are shipped they serve their beta.

    At the beta of the study the samples are kept for the other parts where none are shipped.
    """
    problem = given.problems[0]
    streams, tokens, log_score = config.streams("rejection"), [], []
    for i, start in enumerate(range(0, study.rejection_samples, config.rows)):
        size = min(config.rows, study.rejection_samples - start)
        tokens.append(sample_proposal(problem.base, None, size, streams(i)).tokens)
        texts = problem.potential.texts(tokens[-1])
        log_score.append(each_once(problem.toxicity, texts).to(tokens[-1].device))
    proposals, scores = torch.cat(tokens), torch.cat(log_score)  # [N, T], [N]
    rows = []
    for beta in sorted({*study.rejection_betas, config.beta}):
        target = problem.target if beta == config.beta else None
        if target is None:
            log_phi = beta * scores if beta > 0 else torch.zeros_like(scores)
            kept = accept(log_phi, config.generator("accept", str(beta)))
            log_z = log_mean_with_error(log_phi)
            target = Target(proposals[kept], log_phi[kept], len(proposals), *log_z)
            if len(target.tokens) < 2:
                words = f"{len(target.tokens)} of {len(proposals)} base samples were accepted at beta {beta:g}"
                raise InputError(f"{words}; raise the number of samples for rejection")
            if beta == config.beta:
                save_target(out / "target", target, sigma_key(config, problem.prompt))
        row = {"beta": beta, **rejection_row(study, config, given, target, beta)}
        if beta == config.beta:
            row["kl_base"] = kl(problem.base, None, problem.base, target)
        rows.append(row)
    return {"rows": rows}


def rejection_row(study: StudyConfig, config: RunConfig, given: Ingredients, target: Target, beta: float) -> dict:
    """Acceptance, toxicity of all accepted samples and similarity of the first of them."""
    samples = score(given.problems[0], target.tokens, list(range(len(target.tokens))))
    few = study.similarity_samples
    first = Samples(samples.texts[:few], samples.toxicity[:few], samples.log_phi[:few], samples.group[:few])
    row = measure(study, config, given, first, str(beta))
    return row | {
        "toxicity": number(mean_estimate(samples.toxicity)),
        "histogram": torch.histc(samples.toxicity.float(), BINS, 0, 1).int().tolist(),
        "sequences": len(samples.texts),
        "acceptance": share(len(target.tokens), target.num_proposals),
        "proposals": target.num_proposals,
        "log_z": number(Estimate(target.log_z, target.log_z_std_error, target.num_proposals - 1.0)),
    }


def whole_run(study: StudyConfig, config: RunConfig, given: Ingredients, part: Part, out: Path) -> dict:
    """Algorithm 1 in a run's directory, which a later call continues, and the numbers of its generations."""
    path, shared = Path(config.out), out / "shared" / str(part.seed)
    if not (path / "results.json").exists():
        finish_run(config, given, path, shared, SHARED.get(part.kind))
    results = read_json(path / "results.json")
    samples = samples_by_source(path)
    rows = []
    for row in results["generations"]:
        m = row["generation"]
        found = measure(study, config, given, samples[f"generation {m}"], m)
        value, half = row["kl_target_proposal"], row["kl_half_width"]
        found |= {name: row[name] for name in ("log_z_hat_mean", "log_z_hat_std", "ess", "distinct", "model_toxicity")}
        found |= {"generation": m, "kl": {"value": value, "low": value - half, "high": value + half}}
        if part.kind == "no-effective":
            found |= {"drift": drift(config, given, path, m)}
        rows.append(found)
    return {"rows": rows}


def finish_run(config: RunConfig, given: Ingredients, path: Path, shared: Path, taken: tuple[str, ...] | None) -> None:
    """Begin the run or go on with it, to its end; `taken` names the phases that a variant takes from the run itself."""
    if (path / "resume" / "start").exists():
        run = RunDirectory.resume(path, config, identity(config))
    else:
        shutil.rmtree(path, ignore_errors=True)  # killed before it had begun
        run = RunDirectory.create(config, identity(config))
    with run:
        for name in taken or ():
            if not (path / "resume" / name).exists() and (shared / name).exists():
                copy_whole(shared / name, path / "resume" / name)
        problem = given.problems[0]
        result = {
            "prompt": problem.prompt,
            "potential": list(config.potential),
            "base": evaluate_base(config, problem, given, run),
        }
        result["target"] = evaluate_target(problem, given, run)
        result["generations"] = [rows[0] for rows in self_distilled_tsmc(config, given, run)]
        draw_figures([result], run)
        if taken is None:
            for name in {name for names in SHARED.values() for name in names}:
                if (path / "resume" / name).exists():
                    copy_whole(path / "resume" / name, shared / name)
        run.finish([result])


def copy_whole(source: Path, path: Path) -> None:
    """Copy a file whole or not at all."""
    with replacing(path) as temporary:
        shutil.copyfile(source, temporary)


def samples_by_source(path: Path) -> dict[str, Samples]:
    """The sets of texts in a run's samples.jsonl."""
    rows: dict[str, list[dict]] = {}
    for line in (path / "samples.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        rows.setdefault(row["source"], []).append(row)
    return {
        source: Samples(
            [row["text"] for row in of_source],
            torch.tensor([row["toxicity"] for row in of_source], dtype=torch.float64),
            torch.tensor([row["log_phi"] for row in of_source], dtype=torch.float64),
            [row["run"] for row in of_source],
        )
        for source, of_source in rows.items()
    }


def trained_pair(given: Ingredients, path: Path, m: int) -> tuple[Sigma, TwistMLP]:
    """Sigma as p^(m) of a finished run sees it, and psi^(m)."""
    device = given.problems[0].base.prompt.device
    twist = load_twist(path / f"generation-{m}", device)
    if m == 0:
        return given.sigmas()[0], twist
    model, _ = tinystories.load(path / f"generation-{m}", device)
    return given.sigmas(model.to(given.model.wte.weight.dtype))[0], twist


def drift(config: RunConfig, given: Ingredients, path: Path, m: int) -> dict[str, float]:
    """KL(sigma||sigma_m), sigma_m proportional to p^(m) phi: what the target of generation m is without phi^(m).

    E_sigma[log p^(0) - log p^(m)] - log Z_sigma + log Z_m, with log Z_m from bare samples of p^(m).
    """
    if m == 0:
        return {"value": 0.0, "low": 0.0, "high": 0.0}
    problem, sigma = given.problems[0], trained_pair(given, path, m)[0]
    target, streams = problem.target, config.streams("drift", m)
    log_phi = []
    for i, start in enumerate(range(0, config.eval.base_samples, config.rows)):
        size = min(config.rows, config.eval.base_samples - start)
        log_phi.append(problem.potential(sample_proposal(sigma.model, None, size, streams(i)).tokens))
    log_z, error = log_mean_with_error(torch.cat(log_phi))
    terms = mean_estimate(
        sequence_log_probs(problem.base, target.tokens) - sequence_log_probs(sigma.model, target.tokens)
    )
    change = difference(
        Estimate(target.log_z, target.log_z_std_error, target.num_proposals - 1.0),
        Estimate(log_z, error, config.eval.base_samples - 1.0),
    )
    return number(difference(terms, change))


def tsmc_row(
    study: StudyConfig,
    config: RunConfig,
    given: Ingredients,
    pair: tuple[Sigma, TwistMLP],
    sizes: tuple[int, int],
    *purpose,
) -> dict:
    """One set of TSMC samples, sizes = (K, R): toxicity, similarity, evidence, ESS, distinct."""
    particles, runs = sizes
    sigma, twist = pair
    streams = config.streams(*purpose)
    population = sample_tsmc(config, sigma, twist, particles, runs, streams, Phase()).alive()
    final = population.samples()  # [R, K, T]
    group = [r for r in range(len(final)) for _ in range(particles)]
    samples = score(given.problems[0], final.flatten(0, 1), group)
    row = measure(study, config, given, samples, *purpose)
    del row["texts"], row["histogram"]
    return row | {
        "log_z_hat": number(mean_estimate(population.log_z)),
        "log_z_hat_std": population.log_z.double().std().item() if len(final) > 1 else 0.0,
        "ess": population.ess.mean().item(),
        "distinct": distinct_share(final),
        "runs": runs,
        "dead_runs": runs - len(final),
    }


def particle_study(study: StudyConfig, config: RunConfig, given: Ingredients, path: Path) -> dict:
    """The trained pairs under every K."""
    rows = []
    for m in range(config.generations + 1):
        pair = trained_pair(given, path, m)
        for particles in study.particle_counts:
            sizes = particles, study.runs_of(particles)
            row = tsmc_row(study, config, given, pair, sizes, "particles", m, particles)
            rows.append({"generation": m, "particles": particles, **row})
    return {"rows": rows}


def resampling_study(study: StudyConfig, config: RunConfig, given: Ingredients, path: Path) -> dict:
    """The trained pairs under every resampling scheme, at every step and where ESS < K / 2, and without resampling."""
    choices = [(scheme, threshold) for scheme in SCHEMES for threshold in (1.0, 0.5)] + [("multinomial", 0.0)]
    rows = []
    for m in range(config.generations + 1):
        pair = trained_pair(given, path, m)
        for scheme, threshold in choices:
            changed = dataclasses.replace(config, resampling=scheme, ess_threshold=threshold)
            sizes = config.eval.particles, study.resampling_runs
            row = tsmc_row(study, changed, given, pair, sizes, "resampling", m, scheme, str(threshold))
            rows.append({"generation": m, "scheme": scheme, "threshold": threshold, **row})
    return {"rows": rows}


def baseline(study: StudyConfig, config: RunConfig, given: Ingredients, part: Part, out: Path) -> dict:
    """One run of DPO or GRPO; one that diverges is a result too: "failed" says how."""
    problem = given.problems[0]
    grid = study.grid(part.method)
    place = part.place if part.kind == "baseline" else best_place(study, part.method, len(grid), out)
    chosen, train = grid[place], dpo if part.method.startswith("dpo") else grpo
    cost = cost_of(part.method, chosen)
    found: dict[str, Any] = {
        "method": part.method,
        "place": place,
        "seed": part.seed,
        "learning_rate": chosen.learning_rate,
        "weight_decay": chosen.weight_decay,
        "strength": chosen.strength,
        "updates": chosen.updates,
        "batch_size": chosen.batch_size,
        "units": cost.units(config.length),
        "scored": cost.sampled,
    }
    generator = config.generator("baseline", part.method, place)
    try:
        policy = train(problem.base, problem.potential, chosen, part.method.endswith("lora"), generator, Phase())
    except InputError as error:
        return found | {"failed": str(error)}
    return found | measure_policy(study, config, given, policy, part)


def measure_policy(study: StudyConfig, config: RunConfig, given: Ingredients, policy: Conditional, part: Part) -> dict:
    """Independent samples of a trained policy, and KL(sigma||pi)."""
    problem = given.problems[0]
    samples = sample_model(config, policy, problem, config.streams("policy", part.name))
    found = measure(study, config, given, samples, "policy", part.name)
    return found | {"kl": kl(policy, None, problem.base, problem.target)}


def distance(point: dict, target: dict) -> float:
    """Euclidean distance of two sets of texts on the similarity-toxicity plane; infinite for a run that diverged."""
    if "failed" in point:
        return math.inf
    return math.dist(*([row[name]["value"] for name in ("similarity", "toxicity")] for row in (point, target)))


def best_place(study: StudyConfig, method: str, size: int, out: Path) -> int:
    """Place in the grid of the run of the sweep that is nearest to Target."""
    rows = read_part(out, "rejection")["rows"]
    target = next(row for row in rows if row["beta"] == study.run.beta)
    sweep = [read_part(out, f"{method}-{place + 1}") for place in range(size)]
    return min(range(size), key=lambda place: distance(sweep[place], target))


def read_part(out: Path, name: str) -> dict:
    """The result file of a finished part."""
    return read_json(out / "parts" / f"{name}.json")
