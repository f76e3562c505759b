"""What each part of a study measures: rows of numbers.

All parts share the M exact samples y of sigma. The `terms` of a row say what each y adds, so that
the error of their mean is, to first order, the error that the exact samples bring:

    kl        log p^(0)(y) + log phi(y) - log q(y)
    energy    2 mean_x |x - y| - 2 mean_y' |y' - y|

N sequences x, R runs, K particles, T tokens, D width of an embedding.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from distill.dpo import dpo
from distill.finetune import Diverged
from distill.grpo import grpo
from eval import baseline, metrics
from eval.parts import LEARNERS, Part, Study, files, target_part
from eval.run.evaluate import draw_model
from eval.run.setup import load_setup, load_target, save_target, sigma_key
from eval.trained import read_network
from tinystories.checkpoint import read_json
from tinystories.errors import InputError
from tsmc import Phases
from tsmc.interfaces import LanguageModel, Twist
from tsmc.rejection import draw_accepted, exact_samples
from tsmc.runs import draw_population
from twist.pair import load_pair
from twist.potential import each_once, seen_from

ROOT = Path(__file__).resolve().parent.parent


class Task:
    """A part in the directory OUT, with its networks, random streams and exact samples."""

    def __init__(self, study: Study, part: Part, out: Path):
        self.study, self.part, self.out = study, part, out
        self.file, self.run = files(study, part, out)
        self.config = study.config(part.method, part.seed)
        self.setup = load_setup(self.config)
        self.phases = Phases(part.seed, self.config.torch_device(), self.config.rows)
        self.words: list[str] = []
        if part.kind != "target":
            target, saved = files(study, target_part(study), out)
            self.words = read_json(target)["words"]
            if self.setup.exact is None:
                key, vocab_size = sigma_key(self.config), self.setup.base.vocab_size
                self.setup.exact = load_target(saved, key, vocab_size)
            self.embed_exact()

    def embed_exact(self) -> None:
        """Compare with the exact samples from here on."""
        exact = self.setup.exact.to(self.config.torch_device())
        self.setup.exact = exact
        self.setup.exact_vectors = self.setup.encode(self.setup.potential.texts(exact.tokens))

    def measure(self, name: str, samples: metrics.Samples, table: str = "samples") -> dict:
        """A row of a table: the numbers of a set of texts, its histogram, and three of them."""
        vectors = self.setup.encode(samples.texts)  # [N, D]
        exact_vectors = self.setup.exact_vectors
        row = metrics.describe(samples, vectors, exact_vectors)
        bins = (20 * samples.scores["toxicity"]).long().clamp(0, 19)
        return {
            **{"table": table, "name": name, **row},
            "terms": {"energy": energy_terms(vectors, exact_vectors).tolist()},
            "words": word_shares(samples.texts, self.words),
            "histogram": (torch.bincount(bins, minlength=20) / len(bins)).tolist(),
            "texts": samples.texts[:: math.ceil(len(samples.texts) / 3)],
        }

    def add_kl(self, row: dict, model: LanguageModel, twist: Twist | None) -> dict:
        """The row with KL(sigma||q); without a twist q is the model."""
        base, exact = self.setup.base, self.setup.exact
        kl, terms = metrics.kl_target_proposal(model, twist, base, exact)
        row["terms"]["kl"] = terms.tolist()
        return row | {"kl": kl.value, "kl_half_width": kl.half_width()}


def energy_terms(x: Tensor, y: Tensor) -> Tensor:
    """The terms [M] of the energy distance of vectors x [N, D] and exact samples y [M, D]."""
    within = metrics.pair_distances(y, y).sum(0) / (len(y) - 1)
    return 2 * (metrics.pair_distances(x, y).mean(0) - within)


def word_shares(texts: list[str], words: list[str]) -> dict[str, float]:
    """The share of the texts that hold each word."""
    found = [set(re.findall(r"[a-z']+", text.lower())) for text in texts]
    return {word: sum(word in held for held in found) / len(found) for word in words}


def telling_words(texts: list[str], others: list[str], count: int) -> list[str]:
    """The words whose share of `texts` exceeds their share of `others` most."""
    words = sorted(set(re.findall(r"[a-z']+", " ".join(texts).lower())))
    here, there = word_shares(texts, words), word_shares(others, words)
    return sorted(words, key=lambda word: there[word] - here[word])[:count]


def measure_target(task: Task) -> dict:
    """The rows Base, Best of n and Target, and those of rejection at beta 0, 1 and the run's."""
    study, config, setup = task.study, task.config, task.setup
    base = setup.base

    def rejection(phase: str, log_phi: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        draw = partial(draw_accepted, base, log_phi)
        return task.phases.draw(phase, None, study.proposals, draw)

    if setup.exact is None:
        setup.exact = exact_samples(rejection("target", setup.potential))
        if len(setup.exact.tokens) < 4:
            raise InputError("fewer than 4 exact samples were accepted; soften the potential")
        save_target(task.run, setup.exact, sigma_key(config))
    task.embed_exact()
    exact = setup.score(setup.exact.tokens)
    plain = setup.score(draw_model(task.phases, "base", base, config.eval_base_samples))
    task.words = telling_words(exact.texts, plain.texts, study.words)
    drawn = study.best_of * study.best_texts
    tokens = draw_model(task.phases, "best of n", base, drawn)
    groups = setup.potential(tokens).view(-1, study.best_of)  # [best_texts, n]
    best = groups.argmax(1) + study.best_of * torch.arange(len(groups), device=groups.device)
    kept = rejection("beta 1", lambda rows: setup.log_toxicity(setup.potential.texts(rows)))
    count = config.eval_runs * config.eval_particles
    log_z = setup.exact.evidence()
    target = {  # its energy is the noise level
        "energy": metrics.energy_floor(setup.exact_vectors, count),
        "log_z": log_z.value,
        "log_z_half_width": log_z.half_width(),
    }
    by_beta = [("0", plain, 1.0)]
    by_beta.append(("1", setup.score(kept["tokens"]), len(kept["tokens"]) / study.proposals))
    by_beta.append((f"{config.beta:g}", exact, len(exact.texts) / setup.exact.num_proposals))
    rows = [
        task.add_kl(task.measure("Base", plain), base, None),
        task.measure(f"Best of {study.best_of}", setup.score(tokens[best])),
        task.measure("Target", exact) | target,
    ]
    for name, samples, share in by_beta:
        rows.append(task.measure(name, samples, "beta") | {"accepted": share})
    return {"rows": rows, "words": task.words}


def run_main(arguments: list[str]) -> float:
    """Run main.py on one thread; its processor seconds. InputError where it fails."""
    before = os.times()
    ended = subprocess.run(
        [sys.executable, "main.py", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    if ended.returncode:
        raise InputError("main.py has failed; its last line says why")
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])  # of processes that have ended


def measure_run(task: Task) -> dict:
    """A run of main.py, begun or continued: its generations and new populations of their pairs."""
    study, part, config = task.study, task.part, task.config
    path = task.run.resolve()
    is_new = not (path / "config.json").exists()
    if is_new:
        shutil.rmtree(path, ignore_errors=True)
        options = [*study.arguments(part.method, part.seed), "--out", str(path)]
    else:
        options = ["--quiet", "--resume", str(path)]
    seconds = run_main(options)
    rows = []
    results = read_json(path / "results.json")
    for found in results["generations"]:
        m = found["generation"]
        pair = load_pair(path / f"generation-{m}", task.setup.base, read_network)
        row = task.measure(part.method, generation_samples(path, m))
        twist = pair.twist
        row = task.add_kl(row, pair.model, twist)
        names = ("log_z", "log_z_hat_mean", "log_z_hat_std", "ess", "distinct")
        row |= {"generation": m, **{name: found[name] for name in names}}
        if part.method in LEARNERS:
            rows.append(population_row(task, pair.model, twist, m))
        if m == config.generations:
            row["scores"] = results["scores"]
            if config.keeps_sigma():  # else its samples are those of another target
                row["ess_per_score"] = found["worth"]
        rows.append(row)
    return {"rows": rows, "seconds": seconds if is_new else None}


def generation_samples(path: Path, m: int) -> metrics.Samples:
    """The texts of generation m in a run's samples.jsonl."""
    lines = (path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["source"] == f"generation {m}"]
    scores = {
        name: torch.tensor([-math.inf if row[name] is None else row[name] for row in rows]).double()
        for name in ("log_phi", "toxicity")
    }
    return metrics.Samples([row["text"] for row in rows], scores, [row["run"] for row in rows])


def population_row(task: Task, model: LanguageModel, twist: Twist | None, m: int) -> dict:
    """The toxicity of populations of different K (paper, Fig. 2)."""
    config, setup, study = task.config, task.setup, task.study
    sigma = seen_from(model, setup.base, setup.potential, config.keeps_sigma())
    row = {"table": "populations", "name": task.part.method, "generation": m}
    for particles in study.populations:
        runs = max(1, study.particles // particles)
        named = (task.phases, f"populations of {particles}", m, sigma, twist)
        population = draw_population(*named, particles, runs, **config.rule()).alive()
        texts = setup.potential.texts(population.samples.flatten(0, 1))
        row[f"K = {particles}"] = each_once(setup.log_toxicity, texts).exp().mean().item()
    return row


def measure_sweep(task: Task) -> dict:
    """A row for each setting of a baseline that was tried, and the best one."""
    rows = {}

    def energy(setting: baseline.Setting) -> float:
        row = train_baseline(task, setting, task.study.share)
        named = f"{row['name']} {row['learning_rate']:g} {row['strength']:g}"
        rows[setting] = row | {"table": "sweep", "name": named, "setting": setting}
        return rows[setting].get("energy", math.inf)

    best, is_inside = baseline.search(energy, task.study.first, task.study.widenings)
    return {"rows": [*rows.values()], "best": best, "inside": is_inside}


def measure_baseline(task: Task) -> dict:
    """The best setting of a sweep at the whole cost."""
    study, method = task.study, task.part.method
    sweep = Part(f"sweep-{method}", "sweep", method, study.sweep_seed)
    best = read_json(files(study, sweep, task.out)[0])["best"]
    return {"rows": [train_baseline(task, tuple(best), 1.0)]}


def train_baseline(task: Task, setting: baseline.Setting, share: float) -> dict:
    """The row of a baseline that may spend a share of the default's scores."""
    study, method, setup, config = task.study, task.part.method, task.setup, task.config
    scores = share * config.scores(config.generations)
    options = baseline.baseline_config(method, setting, scores, study.batch_size)
    row = {"table": "samples", "name": method, "scores": options.updates * options.batch_size}
    row |= {"learning_rate": options.learning_rate, "strength": options.strength}
    learn = dpo if method.startswith("dpo") else grpo
    is_lora = method.endswith("lora")
    try:
        stream = task.phases.stream(method, *setting)
        policy = learn(setup.base, setup.potential, options, is_lora, stream)
    except Diverged as error:
        return row | {"diverged": str(error)}
    phase = f"{method} {setting}"
    tokens = draw_model(task.phases, phase, policy, config.eval_base_samples)
    return task.add_kl(row | task.measure(method, setup.score(tokens)), policy, None)


MEASURE = {
    "target": measure_target,
    "run": measure_run,
    "sweep": measure_sweep,
    "baseline": measure_baseline,
}
