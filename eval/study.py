"""The jobs of docs/results.md.

    python -m eval.study --only paper pooled    makes the jobs of these names that are not kept
    python -m eval.study --report               fills README.md and docs/results.md, draws figures

A job NAME-SEED is made in runs/study, and gone on with where it was begun. When it has finished,
its numbers are kept in docs/results/runs/NAME-SEED.json with the command, version and commit that
made them; nothing else of it is needed, so a study goes on where another machine left it.
`eval/report.py` makes its tables and figures.
"""

import dataclasses
import math
import os
import subprocess
import sys
import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from distill import load_pair
from eval.command import OneLineParser, one_line_errors
from eval.compare import best_of_row
from eval.job import PAIR, read_lines
from eval.metrics import KL
from eval.options import read_options, saved_options
from eval.report import Places, draw_study, fill
from eval.sample import TrainedJob
from eval.world import SAMPLES, load_target, load_world, save_target, target_directory
from tinystories.files import read_json, read_tensors, write_json, write_text
from tsmc import SCHEMES, Rule, Streams
from tsmc.proposal import proposal_log_probs
from tsmc.rejection import exact_samples

FIVE, THREE = (91, 92, 93, 94, 95), (91, 92, 93)
PAPER, POOLED = "--learner paper", "--learner pooled"
DPG = "--objective dpg --ctl-learning-rate 5e-4"
ONCE = "--generations 0 --ctl-batch-size 500"  # the scores of `paper` 2 in generation 0
SIZES = "--eval-particles 50 20 100 1000"
SAD = "--potential docs/sad.py:log_phi --target docs/results/sad"
SMOL = "--lm smollm2 --potential docs/sad.py:log_phi --target docs/results/smollm2"
QUESTION = "--lm smollm2 --potential docs/question.py:log_phi"
FRESH = "docs/results/fresh"  # exact samples of the first task, drawn after all tuning
# Draws of p for the exact samples that all runs of a task share, and their seed.
TARGETS = {
    FRESH: (900_000, 1),
    "docs/results/sad": (300_000, 0),
    "docs/results/smollm2": (150_000, 0),
}
RUNS = {  # options and seeds
    "paper": (f"{PAPER} {SIZES}", FIVE),
    "pooled": (f"{POOLED} {SIZES}", FIVE),
    "every-step": (f"{PAPER} --ess-threshold 1", FIVE),  # as the paper resamples
    "no-twist": (f"{PAPER} --ctl-updates 1 --ctl-learning-rate 0", FIVE),  # psi = 1
    "more-twist": (f"{PAPER} {ONCE}", FIVE),
    "dpg": (f"{PAPER} {DPG}", THREE),
    "dpg-alone": (f"{PAPER} {DPG} {ONCE}", FIVE),
    "sixo": (f"{PAPER} --objective sixo", THREE),
    "lora": (f"{PAPER} --student lora", THREE),
    "no-effective-potential": (f"{PAPER} --no-effective-potential", THREE),
    "no-surrogate": (f"{POOLED} --no-surrogate", THREE),
    "dpo-full": ("--learner dpo", THREE),
    "dpo-lora": ("--learner dpo --student lora --learning-rate 1e-3", THREE),
    "grpo-full": ("--learner grpo", THREE),
    "grpo-lora": ("--learner grpo --student lora --learning-rate 3.2e-3", THREE),
    "rl": ("--learner rl", THREE),
    "dpo-ten": ("--learner dpo --batch-size 1280", (91,)),  # ten times the scores
    "grpo-ten": ("--learner grpo --batch-size 1280", (91,)),
    "beta-1": (f"{POOLED} --generations 0 --beta 1", (91,)),
    "sad-paper": (f"{PAPER} {SAD}", THREE),
    "sad-more-twist": (f"{PAPER} {ONCE} {SAD}", THREE),
    "sad-dpg-alone": (f"{PAPER} {DPG} {ONCE} {SAD}", THREE),
    "sad-pooled": (f"{POOLED} {SAD}", THREE),
    "sad-every-step": (f"{PAPER} --ess-threshold 1 {SAD}", THREE),
    "sad-dpo-full": (f"--learner dpo {SAD}", THREE),
    "sad-grpo-full": (f"--learner grpo {SAD}", THREE),
    "smollm2-paper": (f"{PAPER} {SMOL}", FIVE),
    "smollm2-pooled": (f"{POOLED} {SMOL}", FIVE),
    "smollm2-earlier-pooled": (f"{POOLED} {SMOL}", (91, 92)),  # by version 0.15
    "question-paper": (f"{PAPER} {QUESTION}", THREE),
    "question-pooled": (f"{POOLED} {QUESTION}", THREE),
}
RULES = {  # of resampling, under which the pairs of the runs RULED are measured
    "multinomial, every step": ("multinomial", 1.0),
    "systematic, every step": ("systematic", 1.0),
    "ESS < K/2": ("systematic", 0.5),
    "ESS < K/4": ("systematic", 0.25),
    "end alone": ("systematic", 0.0),
}
RULED = ("paper", "sad-paper")
BEST, BEST_OF = 50, ("dpo-full", "sad-dpo-full")  # with these runs the best of 50 texts of p
COUNTED, BINS = ("paper", "beta-1"), 20  # of these jobs the toxicity of p and sigma is counted
AGAIN = ("paper", "pooled")  # these have a second KL, by the exact samples FRESH

RUNNING, KEPT = Path("runs/study"), Path("docs/results/runs")
PAGE, README = Path("docs/results.md"), Path("README.md")
ALONE = threading.Lock()  # for potentials of users, which may change the state of the process


def make(name: str) -> bool:
    """Begin or resume a job, by its name with its seed, and keep its numbers; whether it ended."""
    path = RUNNING / name
    kind, _, seed = name.rpartition("-")
    command = RUNS[kind][0]
    describe = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True).stdout.strip()
    version = tomllib.loads(Path("pyproject.toml").read_text())["project"]["version"]
    made = {"name": kind, "seed": int(seed), "command": command}
    made |= {"version": version, "commit": commit}
    if "--target" in command:
        with ALONE:  # the other runs of the task wait
            make_target(command.split())
    arguments = [*command.split(), "--seed", seed, "--out", str(path)]
    if (path / "config.json").exists():
        arguments = ["--resume", str(path)]
    done = subprocess.run([sys.executable, "main.py", *arguments], stdout=subprocess.DEVNULL)
    if done.returncode == 0:
        with ALONE:
            keep(path, made)
    print(f"{name}: {'failed' if done.returncode else 'done'}", flush=True)
    return done.returncode == 0


def make_target(arguments: list[str]) -> None:
    """Exact samples of the sigma of these options, where --target says, unless they are there."""
    options = read_options(arguments, "")[0]
    if not Path(options.target).exists():
        own = dataclasses.replace(options, target="")
        world = load_world(own)
        count, seed = TARGETS[options.target]
        streams = Streams(seed, own.torch_device())
        exact = exact_samples(world.base, world.potential, streams, "exact samples", count)
        world.set_exact(exact)
        save_target(Path(options.target), world, own)


def keep(job: Path, made: dict) -> None:
    """Write the numbers of a finished job for the tables: its rows, seconds, rules, best of n."""
    options = saved_options(job)
    results = read_json(job / "results.json") | read_json(job / "config.json")["versions"] | made
    here = ("out", "lm", "toxicity_model", "similarity_model", "target", "device")
    kept = options.as_json().items()
    results["options"] = {name: value for name, value in kept if name not in here}
    spent = read_json(job / "base" / "seconds.json")["core_seconds"]
    for m, row in enumerate(results["generations"]):
        spent += read_json(job / f"generation-{m}" / "seconds.json")["core_seconds"]
        row["core_seconds"] = spent  # of the whole job up to here
        for record in read_lines(job / f"generation-{m}" / "metrics.jsonl"):
            if "distinct" in record:
                row["distinct_texts"] = record["distinct"]
                row["beginnings"] = record.get("beginnings")
    if made["name"] in RULED:
        results["rules"] = [rules(job, m) for m in range(len(results["generations"]))]
    if made["name"] in BEST_OF:
        results["best_of"] = best_of_row(BEST, options, load_world(options, job))
    if made["name"] in COUNTED:
        results["histograms"] = histograms(job)
    if made["name"] in AGAIN:
        rows = [results["base"], *results["generations"]]
        for row, kl in zip(rows, fresh_kls(job, len(rows) - 1), strict=True):
            row["kl_fresh"] = kl
    write_json(KEPT / f"{job.name}.json", results)


def histograms(job: Path) -> dict[str, list[float]]:
    """How many texts of p, and of the exact samples, have a toxicity in each of BINS bins."""
    options = saved_options(job)
    base = read_tensors(job / "base" / SAMPLES)["log_phi"]
    exact, _ = load_target(target_directory(options, job))
    log_phi = {"Base": base, "Target": exact.log_phi}  # beta times the log of the toxicity
    toxicity = {name: (values / options.beta).exp() for name, values in log_phi.items()}
    return {name: values.histc(BINS, 0, 1).tolist() for name, values in toxicity.items()}


def rules(job: Path, m: int) -> dict[str, dict]:
    """What the pair of generation m gives under each rule, by as many texts as a row has."""
    trained, found = TrainedJob(job, m), {}
    sizes = trained.options.eval_particles[0], trained.options.eval_runs
    for name, (resampling, threshold) in RULES.items():
        drawn = trained.sample(*sizes, Rule(SCHEMES[resampling], threshold))
        scores = drawn.scores.get("toxicity", drawn.scores["log_phi"])
        ancestors = drawn.population.ancestors.cpu()  # of the samples [R, K]
        scores = scores.view_as(ancestors).gather(1, ancestors)[drawn.population.is_alive().cpu()]
        found[name] = {"score": scores.mean().item()}
    return found


def fresh_kls(job: Path, count: int) -> list[float]:
    """KL(sigma||p), then KL(sigma||q) of each generation, by the exact samples FRESH."""
    make_target(["--target", FRESH])
    world = load_world(dataclasses.replace(saved_options(job), target=FRESH), job)
    log_q = [world.reference.log_p]  # [A] each
    for m in range(count):
        pair = load_pair(job / f"generation-{m}" / PAIR, world.base)
        log_q.append(proposal_log_probs(pair.model, pair.twist, world.reference.exact.tokens)[1])
    return [world.kl_row(values)[KL] for values in log_q]


def read_runs(folder: Path) -> Places:
    """The rows of all runs that are kept: "NAME M", "NAME Base", "NAME Target" and others."""
    places: Places = {}
    for path in sorted(folder.glob("*.json")):
        record = read_json(path)
        if record["command"] != RUNS.get(record["name"], ("",))[0]:
            fault = f"{path}: was made by {record['command']}, which is not that of the study"
            raise ValueError(f"{fault}; delete it, and make it again")
        rows = {str(m): row for m, row in enumerate(record["generations"])}
        for m, row in rows.items():
            row |= {f"K = {size}": score for size, score in row.get("populations", {}).items()}
            for rule, found in record["rules"][int(m)].items() if "rules" in record else ():
                row[rule] = found["score"]
        rows["Base"] = record["base"] | {"acceptance_rate": 1.0}  # the target of beta = 0
        if target := record.get("target"):
            rows["Target"] = target | {"acceptance_rate": math.exp(target["log_z"])}
            # KL(sigma||p) = E_sigma[log phi] - log Z, which earlier versions did not keep.
            rows["Base"].setdefault(KL, target["log_phi"] - target["log_z"])
        for title, counts in record.get("histograms", {}).items():
            rows[title]["counts"] = counts
        if record["name"] in BEST_OF:  # of texts of p, whatever the job has learned
            task = "sad-" if record["name"].startswith("sad-") else ""
            places.setdefault(f"{task}p best of {BEST}", {})[record["seed"]] = record["best_of"]
        for title, row in rows.items():
            for of_one_job in ("kl_half_width", "log_z_std_error"):  # here intervals are over seeds
                row.pop(of_one_job, None)
            places.setdefault(f"{record['name']} {title}", {})[record["seed"]] = row
    return places


def main(arguments: list[str] | None = None) -> None:
    """Make what is missing, several at a time, or the report; Ctrl-C ends all of it."""
    with one_line_errors("python -m eval.study"):
        parser = OneLineParser("python -m eval.study", description=__doc__.splitlines()[0])
        parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), help="names")
        parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a thread each")
        parser.add_argument("--report", action="store_true", help="fill the tables, make no job")
        args = parser.parse_args(arguments)
        if args.jobs < 1:
            parser.error(f"--jobs is {args.jobs}; give a number at least 1")
        if args.report:
            places = read_runs(KEPT)
            for page in (PAGE, README):
                write_text(page, fill(page.read_text(encoding="utf-8"), places))
            sizes = sorted(SIZES.split()[1:], key=int)
            draw_study(places, PAGE.with_suffix(""), list(RULES), sizes)
            return
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
        names = [f"{name}-{seed}" for name in args.only for seed in RUNS[name][1]]
        missing = [name for name in names if not (KEPT / f"{name}.json").exists()]
        if not missing:
            print(
                f"all {len(names)} jobs are kept in {KEPT}; one whose file is deleted is made again"
            )
        with ThreadPoolExecutor(args.jobs) as pool:
            failed = list(pool.map(make, missing)).count(False)
        if failed:
            raise ValueError(f"{failed} runs failed, see above; mend them and start again")


if __name__ == "__main__":
    main()
