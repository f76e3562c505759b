"""Parts of a study that run Algorithm 1, and parts that look at what such a run has trained.

A run lives in OUT/runs and is one of `main.py`: a part that was killed goes on inside the phase where it stopped. The
variants of a run (without the effective potential, by LoRA) are the run itself up to where they part from it; the states of
those phases are handed on in OUT/shared, so that no variant repeats them.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import torch

from eval.metrics import Samples, distinct_share, sample_tsmc, score
from eval.paper.task import Task, number
from eval.run.directory import RunDirectory
from eval.run.figures import draw_figures
from eval.run.saved import load_generation
from eval.run.setup import identity
from main import measured_algorithm
from tinystories.checkpoint import read_json, replacing
from tsmc import SCHEMES
from tsmc.estimate import Estimate, difference, mean_estimate
from tsmc.proposal import proposal_log_probs, sequence_log_probs
from tsmc.rejection import log_mean_with_error
from tsmc.sampler import Sigma
from tsmc.steps import Phase
from twist import TwistMLP

SHARED = {  # phases of the run itself that a variant takes over
    "no-effective": ("0-twist-learning", "0-evaluation", "1-sampling", "1-distillation"),
    "lora": ("0-twist-learning", "0-evaluation", "1-sampling"),
}


def whole_run(task: Task) -> dict:
    """Algorithm 1 in a run's directory, and the numbers of its generations."""
    path = Path(task.config.out)
    if not (path / "results.json").exists():
        finish_run(task, path)
    samples = samples_by_source(path)
    rows = []
    for row in read_json(path / "results.json")["generations"]:
        m, value, half = row["generation"], row["kl_target_proposal"], row["kl_half_width"]
        found = task.measure(samples[f"generation {m}"], m)
        found |= {name: row[name] for name in ("log_z_hat_mean", "log_z_hat_std", "ess", "distinct", "model_toxicity")}
        found |= {"generation": m, "kl": {"value": value, "low": value - half, "high": value + half}}
        found["log_q"] = log_q_of_target(task, path, m)
        if task.part.kind == "no-effective":
            found |= {"drift": drift(task, path, m)}
        rows.append(found)
    return {"rows": rows}


def log_q_of_target(task: Task, path: Path, m: int) -> list[float]:
    """log q of every exact sample of sigma: changes of KL(sigma||q) are paired over them."""
    sigma, twist = trained_pair(task, path, m)
    return [round(value, 4) for value in proposal_log_probs(sigma.model, twist, task.problem.target.tokens)[1].tolist()]


def finish_run(task: Task, path: Path) -> None:
    """Begin the run or go on with it, to its end."""
    config = task.config
    if (path / "resume" / "start").exists():
        run = RunDirectory.resume(path, config, identity(config))
    else:
        shutil.rmtree(path, ignore_errors=True)  # killed before it had begun
        run = RunDirectory.create(config, identity(config))
    with run:
        take_shared(task, path)
        results = measured_algorithm(config, task.given, run)
        if task.part.kind == "tsmc":
            draw_figures(results, run)
            give_shared(task, path)
        run.finish(results)


def take_shared(task: Task, path: Path) -> None:
    """States of the phases that a variant shares with the run of its seed, if that run has left them."""
    for name in SHARED.get(task.part.kind, ()):
        source = task.out / "shared" / str(task.part.seed) / name
        if source.exists() and not (path / "resume" / name).exists():
            copy_whole(source, path / "resume" / name)


def give_shared(task: Task, path: Path) -> None:
    """Leave the states that variants of this run will want."""
    for name in sorted({name for names in SHARED.values() for name in names}):
        if (path / "resume" / name).exists():  # not so without a generation 1
            copy_whole(path / "resume" / name, task.out / "shared" / str(task.part.seed) / name)


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


def trained_pair(task: Task, path: Path, m: int) -> tuple[Sigma, TwistMLP]:
    """Sigma as p^(m) of a finished run sees it, and psi^(m)."""
    sigmas, twist = load_generation(task.given, path / f"generation-{m}", m, task.problem.base.prompt.device)
    return sigmas[0], twist


def drift(task: Task, path: Path, m: int) -> dict[str, float]:
    """KL(sigma||sigma_m), sigma_m proportional to p^(m) phi: what the target of generation m is without phi^(m).

    E_sigma[log p^(0) - log p^(m)] - log Z_sigma + log Z_m, with log Z_m from bare samples of p^(m).
    """
    if m == 0:
        return {"value": 0.0, "low": 0.0, "high": 0.0}
    config, problem, sigma = task.config, task.problem, trained_pair(task, path, m)[0]
    target, count = problem.target, config.eval.base_samples
    log_z, error = log_mean_with_error(problem.potential(task.draw(sigma.model, count, "drift", m)))
    terms = sequence_log_probs(problem.base, target.tokens) - sequence_log_probs(sigma.model, target.tokens)  # [N]
    change = difference(
        Estimate(target.log_z, target.log_z_std_error, target.num_proposals - 1.0),
        Estimate(log_z, error, count - 1.0),
    )
    return number(difference(mean_estimate(terms), change))


def particle_study(task: Task) -> dict:
    """The trained pairs of a run under every K."""
    study, path = task.study, task.out / "runs" / f"tsmc-{task.part.seed}"
    rows = []
    for m in range(task.config.generations + 1):
        pair = trained_pair(task, path, m)
        for particles in study.particle_counts:
            found = tsmc_row(task, pair, particles, study.runs_of(particles), "particles", m, particles)
            rows.append({"generation": m, "particles": particles, **found})
    return {"rows": rows}


def resampling_study(task: Task) -> dict:
    """The trained pairs under every resampling scheme, at every step and where ESS < K / 2, and without resampling."""
    choices = [(scheme, threshold) for scheme in SCHEMES for threshold in (1.0, 0.5)] + [("multinomial", 0.0)]
    path, particles = task.out / "runs" / f"tsmc-{task.part.seed}", task.config.eval.particles
    rows = []
    for m in range(task.config.generations + 1):
        pair = trained_pair(task, path, m)
        for scheme, threshold in choices:
            purpose = "resampling", m, scheme, str(threshold)
            found = tsmc_row(
                task, pair, particles, task.study.resampling_runs, *purpose, scheme=scheme, threshold=threshold
            )
            rows.append({"generation": m, "scheme": scheme, "threshold": threshold, **found})
    return {"rows": rows}


def tsmc_row(
    task: Task,
    pair: tuple[Sigma, TwistMLP],
    particles: int,
    runs: int,
    *purpose: str | int,
    scheme: str = "multinomial",
    threshold: float = 1.0,
) -> dict:
    """R = runs populations of K = particles: toxicity, similarity, evidence, ESS, distinct."""
    config = dataclasses.replace(task.config, resampling=scheme, ess_threshold=threshold)
    population = sample_tsmc(config, *pair, particles, runs, config.streams(*purpose), Phase()).alive()
    final = population.samples()  # [R, K, T]
    group = [r for r in range(len(final)) for _ in range(particles)]
    row = task.measure(score(task.problem, final.flatten(0, 1), group), *purpose)
    del row["texts"], row["histogram"]
    return row | {
        "log_z_hat": number(mean_estimate(population.log_z)),
        "log_z_hat_std": population.log_z.double().std().item() if len(final) > 1 else 0.0,
        "ess": population.ess.mean().item(),
        "distinct": distinct_share(final),
        "fluency": task.fluency(final.flatten(0, 1)),
        "runs": runs,
        "dead_runs": runs - len(final),
    }
