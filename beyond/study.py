"""The jobs of docs/results.md: `main.py` by several options and seeds.

    python -m beyond.study --only paper pooled    makes the jobs of these names that are not kept
    python -m beyond.study --report               fills README.md and docs/results.md, draws figures

A job NAME-SEED is made or resumed in runs/study. Its rows, what is measured beside them, command
and commit are kept in docs/results/runs/NAME-SEED.json. Those of HINTS are no jobs: they train
nothing. N exact samples, R runs of K particles.
"""

import dataclasses
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

from torch import Tensor

from beyond.forced import Forced, pieces_of
from beyond.levels import compare_levels
from beyond.report import DRAWN, draw_study, fill, read_records
from beyond.two_sided import bound_draws
from distill.pair import Pair
from distill.paper import Paper
from eval.evaluate import DRAW, draw_plain, log_importance, mixture_row, weighted_draws
from eval.job import command
from eval.options import Parser, read_options
from eval.sample import TrainedJob
from eval.world import SAMPLES, World, load_target, load_world
from tinystories.load import read_json, write, write_json
from tsmc.draws import normalise
from tsmc.proposal import sequence_log_probs
from tsmc.streams import Streams

FIVE, THREE = (91, 92, 93, 94, 95), (91, 92, 93)
ONCE = "--generations 0 --ctl-batch-size 500"  # the scores of `paper` 2 in generation 0
ALONE = "--ctl-updates 1 --ctl-learning-rate 0 --distill-runs 250"  # psi = 1, scores of `paper`
RULE = "--ess-threshold 1 --ctl-updates 140 --ctl-learning-rate 3e-4"  # the paper's, and its steps
RULE += " --distill-updates 80 --distill-learning-rate 3e-5"
LARGE = "--learner grpo --learning-rate 1e-3 --updates 398"  # tuned by energy
SAD = "--potential docs/sad.py:log_phi --target docs/results/sad"
SMOL = "--lm smollm2 --potential docs/sad.py:log_phi --target docs/results/smollm2"
QUESTION = "--lm smollm2 --potential docs/question.py:log_phi"
RUNS = {  # options and seeds
    "paper": ("", FIVE),
    "pooled": ("--learner pooled", FIVE),
    "rule": (f"{RULE} --distill-runs 300", FIVE),
    "rule-50": (f"{RULE} --distill-runs 40", FIVE),  # with the scores of `paper`
    "every-step": ("--ess-threshold 1", FIVE),
    "no-twist": (ALONE, FIVE),
    "more-twist": (ONCE, FIVE),
    "dpg": ("--learner dpg", THREE),
    "dpg-alone": (f"--learner dpg {ONCE}", FIVE),
    "lora": ("--student lora", THREE),
    "no-effective-potential": ("--no-effective-potential", THREE),
    "no-surrogate": ("--learner pooled --no-surrogate", THREE),
    "dpo-full": ("--learner dpo", THREE),
    "dpo-lora": ("--learner dpo --student lora --learning-rate 1e-3", THREE),
    "grpo-full": (LARGE, THREE),
    "grpo-lora": (f"{LARGE} --student lora --learning-rate 3.2e-3", THREE),
    "dpo-best": ("--learner dpo --learning-rate 1e-5 --updates 75", THREE),  # by KL, on seed 61
    "grpo-best": ("--learner grpo", THREE),
    "rl": ("--learner rl", THREE),
    "dpo-ten": ("--learner dpo --batch-size 1280", (91,)),  # ten times the scores
    "grpo-ten": (f"{LARGE} --batch-size 1280", (91,)),
    "beta-1": ("--learner pooled --generations 0 --beta 1", (91,)),
    "sad-paper": (SAD, THREE),
    "sad-more-twist": (f"{ONCE} {SAD}", THREE),
    "sad-dpg-alone": (f"--learner dpg {ONCE} {SAD}", THREE),
    "sad-pooled": (f"--learner pooled {SAD}", THREE),
    "sad-dpo-full": (f"--learner dpo {SAD}", THREE),
    "sad-grpo-full": (f"{LARGE} {SAD}", THREE),
    "smollm2-paper": (SMOL, FIVE),
    "smollm2-pooled": (f"--learner pooled {SMOL}", FIVE),
    "question-paper": (QUESTION, THREE),
    "question-pooled": (f"--learner pooled {QUESTION}", THREE),
    "smollm2-second": (f"--generations 1 {SMOL}", THREE),
    "question-first": (f"--generations 0 {QUESTION}", THREE),
    "hints": ("", FIVE),
    "other-hints": ("", FIVE),
    "sad-hints": (SAD, THREE),
}
HINTS = {  # words of texts with a large phi, the first by somebody who knew the classifier
    "hints": ["fat", "ugly", "stupid", "dumb"],
    "other-hints": ["bad", "mean", "stupid", "ugly"],
    "sad-hints": ["sad", "cried", "scared", "angry"],
}
RARE = {  # one in 80, 1,000, 30,000, 10^6 and 10^8 texts of p
    "smile": "--potential keyword:smile",
    "dragon": "--potential keyword:dragon",
    "two-words": "--potential keyword:dragon --potential keyword:friend",
    "toxic-dragon": "--potential keyword:dragon --potential toxicity",
    "toxic-words": "--potential keyword:dragon --potential keyword:friend --potential toxicity",
}
RUNS |= {f"{name}-paper": (options, (91,)) for name, options in RARE.items()}
RUNS |= {f"{name}-pooled": (f"--learner pooled {RARE[name]}", (91,)) for name in RARE}
RULES = {  # of resampling, under which the pairs of RULED are measured
    "multinomial, every step": ("multinomial", 1.0),
    "systematic, every step": ("systematic", 1.0),
    "ESS < K/2": ("systematic", 0.5),
    "ESS < K/4": ("systematic", 0.25),
    "end alone": ("systematic", 0.0),
}
RULED = ("paper", "sad-paper")
BOUNDED = ("paper", "rule")  # log Z and KL of a draw of these are bounded, by rule
COUNTED, BINS = ("paper", "beta-1"), 20  # of these the toxicity of p and sigma is counted
AGAIN = ("paper", "pooled")  # these have scores by SIZES, and a KL by the exact samples FRESH
PREFIXES = ("", "sad-", "smollm2-", "question-")  # of the names of a task's runs
DRAWS = ["question-first", *(prefix + kind for prefix in PREFIXES for kind in AGAIN)]  # KL by DRAWN
SIZES = (20, 50, 100, 1000)  # K of the paper's Fig. 2
FRESH = Path("docs/results/fresh")  # of the first task, drawn after all tuning
KEPT = Path("docs/results/runs")
LOCAL = ("out", "lm", "toxicity_model", "similarity_model", "target", "device")  # not kept
PAGES = (Path("docs/results.md"), Path("README.md"))


def make(name: str) -> bool:
    """Begin or resume a job NAME-SEED, and keep its numbers; whether it ended well."""
    kind, _, seed = name.rpartition("-")
    if kind in HINTS:
        keep(kind, int(seed), hinted(kind, seed))
        return True
    path = Path("runs/study") / name
    arguments = [*RUNS[kind][0].split(), "--seed", seed, "--out", str(path)]
    if is_begun := (path / "config.json").exists():
        arguments = ["--resume", str(path)]
    process = subprocess.Popen([sys.executable, "main.py", *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    print(f"{name}: {'failed' if status else 'done'}", flush=True)
    if status == 0:
        results = measured(path, kind)
        if not is_begun:  # else only a part of the time is known
            results["generations"][-1]["core_seconds"] = usage.ru_utime + usage.ru_stime
        keep(kind, int(seed), results)
    return status == 0


def keep(kind: str, seed: int, results: dict) -> None:
    """Write a record: the numbers, and what has made them."""
    results |= {"name": kind, "seed": seed, "command": RUNS[kind][0]}
    describe = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    results["commit"] = subprocess.check_output(describe, text=True).strip()
    write_json(KEPT / f"{kind}-{seed}.json", results)


def hinted(kind: str, seed: str) -> dict:
    """What texts that hold one of HINTS are worth as draws of q, measured as those of pairs."""
    arguments, learners = [*RUNS[kind][0].split(), "--seed", seed], {"paper": "distill.paper:Paper"}
    options, learner, _ = read_options(arguments, learners, "")
    world, streams = load_world(options), Streams(options.seed)
    draw_plain(options, world, learner(world.base, world.potential, options, streams))
    pieces = pieces_of(SimpleNamespace(factors=[SimpleNamespace(hints=HINTS[kind])]), options.lm)
    forced = Forced(world.base, pieces, streams.stream("hints"))
    count = options.eval_particles * options.eval_runs
    tokens, _ = forced.draw(count, streams.stream("forced draws"), 0.0)  # [N, T]
    plain, plain_phi, _ = world.plain
    drawn = []
    for texts, log_phi in ((tokens, world.potential(tokens)), (plain, plain_phi)):
        drawn.append((log_phi - forced.log_over_p(texts), log_phi))
    over_q = world.exact.log_phi - forced.log_over_p(world.exact.tokens)
    row = {"scores": 0, "draws": kl_by_particles(world, drawn, over_q)}
    row |= mixture_row(world, drawn, options.eval_particles, over_q)
    return {"base": {}, "hints": HINTS[kind], "generations": [row]}


def measured(job: Path, kind: str) -> dict:
    """The rows of a finished job, and what the study shows beside them."""
    results, saved = read_json(job / "results.json"), read_json(job / "config.json")
    results["options"] = {key: saved[key] for key in saved if key not in LOCAL}
    finisher = TrainedJob(job).pair if kind == "paper" else None  # of the last generation
    for m, row in enumerate(results["generations"]):
        trained = TrainedJob(job, m)
        world, options = trained.world, trained.options
        sizes = (options.eval_particles, options.eval_runs)  # K, R
        streams = Streams(options.seed, world.base.prompt.device)
        learner = Paper(world.base, world.potential, options, streams)  # which draws any pair
        if (job / "target" / SAMPLES).exists():
            world.exact = load_target(job / "target", options, world.base.prompt.device)
        measure_pair(row, kind, trained, learner)
        if finisher:
            row |= compare_levels(trained, finisher)
        if kind in RULED:
            by_rule = {}
            for rule, (scheme, threshold) in RULES.items():
                changed = dataclasses.replace(options, resampling=scheme, ess_threshold=threshold)
                ruled = Paper(world.base, world.potential, changed, streams)
                by_rule[rule] = {"score": mean_score(trained, ruled, *sizes)}
            results.setdefault("rules", []).append(by_rule)
    trained.pair = Pair(world.base, None)  # of row Base
    if kind in DRAWS:
        results["base"]["draws"] = kl_by_particles(world, *draws_of(trained, learner))
    if kind in AGAIN:
        results["base"]["kl_fresh"] = kl_by(FRESH, trained)
    if kind in COUNTED:
        toxicity = {"Base": score_of(trained.sample(*sizes).scores)}  # of 2,000 texts of p
        toxicity["Target"] = (world.exact.log_phi / options.beta).exp()
        counts = {name: one.cpu().histc(BINS, 0, 1).tolist() for name, one in toxicity.items()}
        results["histograms"] = counts
    return results


def measure_pair(row: dict, kind: str, trained: TrainedJob, learner: Paper) -> None:
    """Add to a row what the study measures of its pair."""
    if distinct := row.pop("figures").get("distinct_texts"):
        row["distinct_texts"] = distinct[-1]
    world, options = trained.world, trained.options
    sizes = (options.eval_particles, options.eval_runs)  # K, R
    drawn = trained.sample(*sizes)
    row["worth"] = drawn.ess / math.prod(sizes)
    shares = normalise(drawn.log_weights.cpu().double())  # [R, K] of each run
    products = shares * score_of(drawn.scores).view_as(shares)
    # Without dead runs and 0 * inf.
    row["weighted_score"] = products[drawn.log_z.cpu() > -math.inf].nansum(1).mean().item()
    is_policy = DRAW not in row
    if world.exact and learner.is_independent(trained.pair) and (is_policy or kind in DRAWS):
        drawn, over_q = draws_of(trained, learner)
        if is_policy:
            row |= mixture_row(world, drawn, sizes[0], over_q)
        if kind in DRAWS:
            row["draws"] = kl_by_particles(world, drawn, over_q)
    if kind in BOUNDED:
        row |= bound_draws(trained, world.exact.tokens, exact_over_q(trained))
    if kind in AGAIN:
        row["populations"] = {}
        for size in SIZES:
            few = max(1, math.prod(sizes) // size)
            row["populations"][size] = mean_score(trained, learner, size, few)
        row["kl_fresh"] = kl_by(FRESH, trained)


def score_of(scores: dict[str, Tensor]) -> Tensor:
    """The toxicity [N] where phi reads it, else log phi."""
    return scores.get("toxicity", scores["log_phi"])


def mean_score(trained: TrainedJob, learner: Paper, particles: int, runs: int) -> float:
    """The mean score of the samples of R = runs runs of K = particles, resampled at T."""
    world, word = trained.world, f"populations of {particles}"
    population = learner.population(trained.pair, word, trained.generation, particles, runs)
    tokens = population.alive().samples.flatten(0, 1)  # [R K, T]
    return score_of(world.score(tokens, world.potential.texts(tokens))).mean().item()


def draws_of(trained: TrainedJob, learner: Paper) -> tuple[list[tuple], Tensor]:
    """`weighted_draws` of a pair, and log p phi / q [N] of the exact samples."""
    world, options = trained.world, trained.options
    draw_plain(options, world, learner)
    sizes = (options.eval_particles, options.eval_runs)
    population = learner.population(trained.pair, "sample", None, *sizes)
    return weighted_draws(world, trained.pair, population), exact_over_q(trained)


def kl_by_particles(world: World, drawn: list[tuple], over_q: Tensor) -> dict[int, float]:
    """KL(sigma||law of a draw) by the number K of particles of a run, from the same draws of q."""
    return {size: mixture_row(world, drawn, size, over_q)[DRAW] for size in DRAWN}


def exact_over_q(trained: TrainedJob) -> Tensor:
    """log p phi / q [N] of the exact samples of the world."""
    exact = trained.world.exact
    log_sigma = sequence_log_probs(trained.world.base, exact.tokens) + exact.log_phi  # [N]
    return log_importance(trained.pair, exact.tokens, log_sigma)


def kl_by(directory: Path, trained: TrainedJob) -> float:
    """KL(sigma||q) by the exact samples of a directory."""
    world, exact = trained.world, trained.world.exact
    world.exact = load_target(directory, trained.options, world.base.prompt.device)
    kl = world.kl(exact_over_q(trained)).value
    world.exact = exact
    return kl


def main(arguments: list[str] | None = None) -> None:
    """Make what is missing, several at a time, or the report; Ctrl-C ends all of it."""
    with command("beyond.study"):
        parser = Parser("python -m beyond.study", description=__doc__.splitlines()[0])
        parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), help="names")
        parser.add_argument("--jobs", type=int, default=2, help="jobs at a time, a thread each")
        parser.add_argument("--report", action="store_true", help="fill the tables, make no job")
        args = parser.parse_args(arguments)
        if args.report:
            rows = read_records(KEPT)
            for page in PAGES:
                write(page, fill(page.read_text(encoding="utf-8"), rows).encode())
            draw_study(rows, PAGES[0].with_suffix(""), list(RULES))
            return
        os.environ["OMP_NUM_THREADS"] = "1"
        names = [f"{name}-{seed}" for name in args.only for seed in RUNS[name][1]]
        missing = [name for name in names if not (KEPT / f"{name}.json").exists()]
        with ThreadPoolExecutor(args.jobs) as pool:
            if not all(list(pool.map(make, missing))):
                raise ValueError("some jobs failed, see above; mend them and start again")


if __name__ == "__main__":
    main()
