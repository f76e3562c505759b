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
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from distill.dpo import dpo
from distill.grpo import grpo
from eval.metrics import Samples, distinct_share, energy_floor, score, score_population
from eval.paper.cost import COSTS, baseline, baseline_cost
from eval.paper.measure import Task, with_interval
from eval.paper.numbers import description, read_rows
from eval.paper.study import METHODS, WHEN, Part, Study
from eval.run.options import saved_config
from eval.run.run import finite_or_null
from eval.run.setup import sigma_key
from eval.run.target import save_target
from eval.run.trained import load_generation
from main import main as run_main
from tinystories.checkpoint import read_json, write_json
from tinystories.errors import InputError
from tinystories.fast import keep_freed_memory
from tsmc import Population, Sigma, in_chunks, sample_runs
from tsmc.estimate import mean_estimate
from tsmc.interfaces import Twist
from tsmc.rejection import draw_accepted, exact_samples


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
    kinds = {"rejection": rejection, "run": trained_run}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            rows = kinds.get(part.kind, trained_baseline)(Task(study, part, out))
    except InputError as error:
        raise InputError(f"{part.name}: {error}") from error
    rows = finite_or_null(json.loads(json.dumps(rows)))
    result = {"description": description(study, part), "rows": rows}
    write_json(out / "parts" / f"{part.name}.json", result)


def rejection(task: Task) -> list[dict]:
    """Base, best of n, Target; the exact samples, shipped or accepted, are saved for all parts."""
    config, setup = task.config, task.setup
    if setup.exact is None:
        draw = partial(draw_accepted, setup.base, setup.potential)
        count, streams = task.study.rejection_samples, config.streams("target")
        setup.exact = exact_samples(in_chunks(draw, count, config.rows, streams))
        if len(setup.exact.tokens) < 2:
            raise InputError("fewer than 2 samples were accepted; soften the potential")
    save_target(task.out / "target", setup.exact, sigma_key(config))
    task.use_exact(setup.exact)
    samples = score(setup.exact.tokens, setup.potential, setup.log_toxicity)
    particles = config.eval.runs * config.eval.particles
    stream = torch.Generator().manual_seed(config.seed)
    task.target = task.measure(samples) | {
        "place": ("rejection", "Target", None),
        "energy": energy_floor(setup.exact_vectors, particles, stream),
        "log_z": with_interval(setup.exact.evidence()),
    }
    tokens = task.draw(setup.base, config.eval.base_samples, "base")
    samples = score(tokens, setup.potential, setup.log_toxicity)
    base = {"place": ("rejection", "Base", None)} | task.measure(samples)
    return [task.add_kl(base, setup.base, None), best_of_n(task), task.target]


def best_of_n(task: Task) -> dict:
    """The row of the best by phi of every n draws of p^(0)."""
    setup, n = task.setup, task.study.best_of
    count = task.config.eval.base_samples // 5
    tokens = task.draw(setup.base, n * count, "best of n")  # [N, T], N = n count
    best = setup.potential(tokens).view(count, n).argmax(1)  # [count]
    tokens = tokens[n * torch.arange(count, device=best.device) + best]  # [count, T]
    name = f"Best of {n}"
    samples = score(tokens, setup.potential, setup.log_toxicity)
    return {"place": ("rejection", name, None), "scored": n * count} | task.measure(samples)


def trained_baseline(task: Task) -> list[dict]:
    """A run of DPO or GRPO and the samples of its policy; one that diverges has no measurements."""
    study, part, config, setup = task.study, task.part, task.config, task.setup
    grid, number = study.grid(part.method), part.setting
    if part.kind == "best":
        sweep = [read_rows(task.out, f"{part.method}-{n + 1}")[0] for n in range(len(grid))]
        energies = [row.get("energy", math.inf) for row in sweep]
        number = energies.index(min(energies))
        if part.seed == study.seeds[0]:
            return [sweep[number] | {"place": ("best", *sweep[number]["place"][1:])}]
    options = baseline(study, part.method, number, setup.model)
    name = f"{part.method}, lr {options.learning_rate:g}, b {options.strength:g}"
    cost = baseline_cost(part.method, options)
    row = {"place": (part.kind, name, None), "updates": options.updates}
    row |= {"units": cost.units(config.length), "scored": cost.scored}
    train = dpo if part.method.startswith("dpo") else grpo
    base = setup.base.with_model(setup.model)
    generator, lora = config.generator(part.method, number), part.method.endswith("lora")
    try:
        policy = train(base, setup.potential, options, lora, generator)
    except InputError:
        return [row]
    tokens = task.draw(policy, config.eval.base_samples, "policy", part.name)
    row |= task.measure(score(tokens, setup.potential, setup.log_toxicity))
    return [task.add_kl(row, policy, None)]


def trained_run(task: Task) -> list[dict]:
    """A run of main.py, begun or continued: its generations, and other samples of its pairs."""
    path = task.out / "runs" / task.part.name
    arguments = [*task.study.arguments(task.part.method, task.part.seed), "--out", str(path)]
    if path.exists():
        if saved_config(path).deciding() != task.config.deciding():
            raise InputError(f"{path}: made with other options; delete it")
        arguments = ["--resume", str(path)]
    try:
        run_main([*arguments, "--quiet"])
    except SystemExit as ended:
        raise InputError("main.py has failed; its last line says why") from ended
    device = task.config.torch_device()
    rows = []
    for m, found in enumerate(read_json(path / "results.json")["generations"]):
        sigma, twist = load_generation(task.setup, path / f"generation-{m}", m, device)
        if task.part.method not in task.study.longer():
            rows.append(generation_row(task, path, found, sigma, twist))
    if task.part.method in task.study.resampled():  # the last pair
        rows += [sampled(task, sigma, twist, m, threshold) for threshold in WHEN]
    return rows


def generation_row(task: Task, path: Path, found: dict, sigma: Sigma, twist: Twist) -> dict:
    """The row of a generation, of which `found` is in the run's results.json."""
    m, method, config = found["generation"], task.part.method, task.config
    row = {"place": ("generations", method, m), "log_z_hat": found["log_z_hat_mean"]}
    for name in ("log_z", "log_z_hat_std", "ess", "distinct", "model_toxicity"):
        row[name] = found[name]
    row = task.add_kl(row | task.measure(generation_samples(path, m)), sigma.model, twist)
    if m == config.generations and method in METHODS:
        cost = COSTS[method](config, task.setup.model)
        row |= {"units": cost.units(config.length), "scored": cost.scored}
    return row


def generation_samples(path: Path, m: int) -> Samples:
    """The texts of generation m in a run's samples.jsonl."""
    lines = (path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["source"] == f"generation {m}"]
    toxicity = torch.tensor([row["toxicity"] for row in rows], dtype=torch.float64)  # [N]
    log_phi = torch.full_like(toxicity, math.nan)  # not measured
    return Samples([row["text"] for row in rows], toxicity, log_phi, [row["run"] for row in rows])


def sampled(task: Task, sigma: Sigma, twist: Twist, m: int, threshold: float) -> dict:
    """The row of the pair of generation m, resampled where ESS < threshold K, without moves.

    All thresholds have the same random numbers, so that their differences vary less.
    """
    config, particles = task.config, task.config.eval.particles
    place = ("resampling", f"{task.part.method}, {WHEN[threshold]}", m)
    rule = config.rule() | {"ess_threshold": threshold}

    def draw(size: int, generator: torch.Generator) -> dict[str, Tensor]:
        return vars(sample_runs(sigma, twist, particles, size, generator, **rule))

    runs, at_once = task.study.resampling_runs, config.rows // particles
    drawn = in_chunks(draw, runs, at_once, config.streams("resampling", m))
    population = Population(**drawn).alive()
    samples = score_population(population, task.setup.potential, task.setup.log_toxicity)
    return task.measure(samples) | {
        "place": place,
        "runs": len(population.log_z),
        "log_z_hat": with_interval(mean_estimate(population.log_z)),
        "log_z_hat_std": population.log_z.double().std().item(),
        "ess": population.ess.mean().item(),
        "distinct": distinct_share(population.samples),
    }
