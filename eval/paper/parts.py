"""What each part of a study computes: rows of numbers, each with its place in the report.

R runs, K particles, N sequences, T tokens.
"""

import contextlib
import io
import json
import math
import multiprocessing
import os
import threading
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from distill.dpo import dpo
from distill.grpo import grpo
from eval.metrics import Samples, distinct_share, energy_floor, score, score_population
from eval.paper.measure import Task, log_z_of, with_interval
from eval.paper.numbers import read_rows
from eval.paper.study import METHODS, Part, Study, baseline_cost
from eval.run.run import finite_or_null
from eval.run.setup import sigma_key
from eval.run.target import save_target
from eval.run.trained import load_generation
from main import main as run_main
from tinystories.checkpoint import read_json, write_json
from tinystories.errors import InputError
from tinystories.fast import keep_freed_memory
from tsmc import SCHEMES, ExactSamples, Population, Sigma, in_chunks, sample_runs
from tsmc.estimate import Estimate, difference, mean_estimate
from tsmc.interfaces import LanguageModel, Twist
from tsmc.proposal import sequence_log_probs
from tsmc.rejection import accept, log_mean_with_error
from twist.potential import each_once

BINS = 20  # of the toxicity histograms
RESAMPLED = {1.0: "every step", 0.5: "ESS < K/2", 0.0: "at the end only"}  # by ESS threshold


def description(study: Study, part: Part) -> str:
    """What the result of a part depends on; the seeds of other parts are left out."""
    return repr((replace(study, seeds=(), few=0), part))


def is_finished(study: Study, part: Part, out: Path) -> bool:
    """Whether a part has its result; InputError where it was made with other settings."""
    path = out / "parts" / f"{part.name}.json"
    if not path.exists():
        return False
    if read_json(path).get("description") != description(study, part):
        raise InputError(f"{path}: made with other settings; choose another --out, or delete it")
    return True


def start_worker() -> None:
    """Prepare a process for its parts: one thread, and an end as soon as the study has ended."""
    os.setpgrp()  # Ctrl-C reaches only the study, which then ends its workers
    tqdm.set_lock(threading.RLock())  # the default one belongs to all processes and would leak
    torch.set_num_threads(1)
    keep_freed_memory()
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """Wait for the end of the process that has started this one."""
    multiprocessing.parent_process().join()
    os._exit(1)


def run_part(study: Study, part: Part, out: Path) -> None:
    """Compute one part and write its file; InputErrors open with its name."""
    kinds = {"rejection": rejection, "run": trained_run, "sweep": baseline, "best": baseline}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            rows = kinds[part.kind](Task(study, part, out))
    except InputError as error:
        raise InputError(f"{part.name}: {error}") from error
    rows = finite_or_null(json.loads(json.dumps(rows)))
    result = {"description": description(study, part), "rows": rows}
    write_json(out / "parts" / f"{part.name}.json", result)


def rejection(task: Task) -> list[dict]:
    """Rejection sampling at every beta, from one set of samples of the base model; Target last.

    The exact samples of sigma, shipped or accepted here, are saved for the other parts.
    """
    config, setup = task.config, task.setup
    proposals = task.draw(setup.base, task.study.rejection_samples, "rejection")  # [N, T]
    if setup.exact is None:
        setup.exact = accepted(task, proposals, setup.potential(proposals), "Target")
    save_target(task.out / "target", setup.exact, sigma_key(config))
    task.use_exact(setup.exact)
    task.target = rejection_row(task, setup.exact, "Target")
    log_toxicity = each_once(setup.log_toxicity, setup.potential.texts(proposals))  # [N]
    rows = []
    for beta in (0.0, *task.study.rejection_betas):
        name = f"β = {beta:g}" if beta else "Base"
        rows.append(rejection_row(task, accepted(task, proposals, beta * log_toxicity, name), name))
    rows[0] |= task.kl(setup.base, None)
    floor = energy_floor(setup.exact_vectors, task.stream("floor"))
    return [*rows, task.target | {"energy": floor}]


def accepted(task: Task, proposals: Tensor, log_phi: Tensor, name: str) -> ExactSamples:
    """Exact samples among proposals [N, T] with log phi [N]; InputError where they are too few."""
    log_phi = log_phi.to(proposals.device)
    kept = accept(log_phi, task.config.generator("accept", name))  # [N]
    if kept.sum() < 2:
        raise InputError(f"{name}: fewer than 2 samples were accepted; soften the potential")
    log_z, error = log_mean_with_error(log_phi)
    return ExactSamples(proposals[kept], log_phi[kept], len(log_phi), log_z, error)


def rejection_row(task: Task, exact: ExactSamples, name: str) -> dict:
    """Acceptance, the toxicity of all accepted samples, and the similarity of the first ones."""
    first = slice(task.config.eval.base_samples)
    samples = score(exact.tokens, task.setup.potential, task.setup.log_toxicity)
    share = len(exact.tokens) / exact.num_proposals
    error = math.sqrt(share * (1 - share) / exact.num_proposals)
    few = Samples(*(values[first] for values in vars(samples).values()))
    return task.measure(few, name) | {
        "place": ("rejection", name, None),
        "toxicity": with_interval(mean_estimate(samples.toxicity)),
        "sequences": len(samples.texts),
        "proposals": exact.num_proposals,
        "acceptance": with_interval(Estimate(share, error, exact.num_proposals - 1.0)),
        "log_z": with_interval(log_z_of(exact)),
        "histogram": torch.histc(samples.toxicity.float(), BINS, 0, 1).int().tolist(),
    }


def baseline(task: Task) -> list[dict]:
    """A run of DPO or GRPO and the samples of its policy; one that diverges has no measurements."""
    study, part, config, setup = task.study, task.part, task.config, task.setup
    grid, number = study.grid(part.method), part.setting
    if part.kind == "best":
        sweep = [read_rows(task.out, f"{part.method}-{n + 1}")[0] for n in range(len(grid))]
        distances = [row.get("distance", math.inf) for row in sweep]
        number = distances.index(min(distances))
        if part.seed == study.seeds[0]:
            return [sweep[number] | {"place": ("best", *sweep[number]["place"][1:])}]
    options = grid[number]
    rates = f"lr {options.learning_rate:g}, decay {options.weight_decay:g}"
    name = f"{part.method}, {rates}, b {options.strength:g}"
    cost = baseline_cost(part.method, options)
    row = {"place": (part.kind, name, None), "updates": options.updates}
    row |= {"units": cost.units(config.length), "scored": cost.sampled}
    train = dpo if part.method.startswith("dpo") else grpo
    base = setup.base.with_model(setup.model)
    generator, lora = config.generator(part.method, number), part.method.endswith("lora")
    try:
        policy = train(base, setup.potential, options, lora, generator)
    except InputError:
        return [row]
    tokens = task.draw(policy, config.eval.base_samples, "policy", part.name)
    row |= task.measure(score(tokens, setup.potential, setup.log_toxicity), "policy", part.name)
    return [row | task.kl(policy, None)]


def trained_run(task: Task) -> list[dict]:
    """A run of main.py, begun or continued: its generations, and other samples of its pairs."""
    path = task.out / "runs" / task.part.name
    arguments = [*task.study.arguments(task.part.method, task.part.seed), "--out", str(path)]
    if path.exists():
        arguments = ["--resume", str(path)]
    try:
        run_main([*arguments, "--quiet"])
    except SystemExit as ended:
        raise InputError("main.py has failed; its last line says why") from ended
    device = task.config.torch_device()
    rows = []
    for m, found in enumerate(read_json(path / "results.json")["generations"]):
        sigma, twist = load_generation(task.setup, path / f"generation-{m}", m, device)
        row = {"place": ("generations", task.part.method, m), "log_z_hat": found["log_z_hat_mean"]}
        for name in ("log_z", "log_z_hat_std", "ess", "distinct", "model_toxicity"):
            row[name] = found[name]
        row |= task.measure(generation_samples(path, m), m) | task.kl(sigma.model, twist)
        if m > 0 and not task.config.effective_potential:
            row["drift"] = drift(task, sigma.model, m)
        rows += [row, *other_samples(task, sigma, twist, m)]
    return rows


def generation_samples(path: Path, m: int) -> Samples:
    """The texts of generation m in a run's samples.jsonl."""
    lines = (path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["source"] == f"generation {m}"]
    toxicity = torch.tensor([row["toxicity"] for row in rows], dtype=torch.float64)  # [N]
    log_phi = torch.full_like(toxicity, math.nan)  # not measured
    return Samples([row["text"] for row in rows], toxicity, log_phi, [row["run"] for row in rows])


def drift(task: Task, model: LanguageModel, m: int) -> tuple[float, float, float]:
    """KL(sigma||sigma_m), sigma_m proportional to p^(m) phi: the target without phi^(m).

    E_sigma[log p^(0) - log p^(m)] - log Z_sigma + log Z_m, with log Z_m from samples of p^(m).
    """
    setup, count = task.setup, task.config.eval.base_samples
    log_z, error = log_mean_with_error(setup.potential(task.draw(model, count, "drift", m)))
    log_p0 = sequence_log_probs(setup.base, setup.exact.tokens)  # [N]
    terms = mean_estimate(log_p0 - sequence_log_probs(model, setup.exact.tokens))
    evidence = difference(log_z_of(setup.exact), Estimate(log_z, error, count - 1.0))
    return with_interval(difference(terms, evidence))


def other_samples(task: Task, sigma: Sigma, twist: Twist, m: int) -> list[dict]:
    """The pair of generation m with every K, sampled as in its run, and with every scheme."""
    study, config, method = task.study, task.config, task.part.method
    rows = []
    if method in METHODS:
        for k in study.particle_counts:
            place = ("particles", f"{method}, K = {k}", m)
            runs = max(8, study.particles_per_point // k)
            rule = config.rule() | {"particles": k, "moves": config.moves}
            rows.append(sampled(task, sigma, twist, place, runs, rule))
    if method == "published" and task.part.seed in study.few_seeds():
        for scheme, resample in SCHEMES.items():
            for threshold, when in RESAMPLED.items():
                place = ("resampling", f"{scheme}, {when}", m)
                rule = {"particles": config.eval.particles}
                rule |= {"resample": resample, "ess_threshold": threshold}
                rows.append(sampled(task, sigma, twist, place, study.resampling_runs, rule))
    return rows


def sampled(task: Task, sigma: Sigma, twist: Twist, place: tuple, runs: int, rule: dict) -> dict:
    """The row of R = runs populations; `rule` are arguments of `sample_runs`, K among them."""

    def draw(size: int, generator: torch.Generator) -> dict[str, Tensor]:
        return vars(sample_runs(sigma, twist, runs=size, generator=generator, **rule))

    at_once = task.config.rows // rule["particles"]
    drawn = in_chunks(draw, runs, at_once, task.config.streams(*place))
    population = Population(**drawn).alive()
    samples = score_population(population, task.setup.potential, task.setup.log_toxicity)
    return task.measure(samples, *place) | {
        "place": place,
        "runs": len(population.log_z),
        "log_z_hat": with_interval(mean_estimate(population.log_z)),
        "log_z_hat_std": population.log_z.double().std().item(),
        "ess": population.ess.mean().item(),
        "distinct": distinct_share(population.samples),
    }
