"""The experiments of docs/results.md: commands of main.py, `python -m eval.study --out runs/study`.

A run lies in OUT/NAME-SEED. What is finished is skipped and what was begun is resumed, so the same
command goes on where it was ended; --only NAME chooses. `python -m eval.report` makes the tables.
"""

import argparse
import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from eval.command import OneLineParser, one_line_errors
from tinystories.checkpoint import write_json

SEEDS, FEW, SWEEP = (91, 92, 93, 94, 95), (91, 92, 93), (90,)
MANY = "--eval-particles 50 20 100 1000"
RUNS = {
    "paper": (f"--learner paper {MANY}", SEEDS),
    "weighted": (f"--learner weighted {MANY}", SEEDS),
    "pooled": (f"--learner pooled {MANY}", SEEDS),
    "lora": ("--learner weighted --student lora", FEW),
    "no-effective-potential": ("--learner weighted --no-effective-potential", FEW),
    "no-surrogate": ("--learner pooled --no-surrogate", FEW),
    "dpo-full": ("--learner dpo", FEW),
    "dpo-lora": ("--learner dpo --student lora --learning-rate 1e-3", FEW),
    "grpo-full": ("--learner grpo", FEW),
    "grpo-lora": ("--learner grpo --student lora --learning-rate 3.2e-3", FEW),
    "beta-1": ("--learner pooled --generations 0 --beta 1", SWEEP),
}
GRID = {"dpo": (0.1, 0.4, 1.6), "grpo": (0.16, 0.64, 2.56)}  # strengths, at each of three rates
for learner, student in itertools.product(GRID, ("full", "lora")):
    for rate, strength in itertools.product((1e-4, 1e-3, 3.2e-3), GRID[learner]):
        chosen = f"--student {student} --learning-rate {rate} --strength {strength}"
        name = f"sweep-{learner}-{student}-{rate}-{strength}"
        RUNS[name] = (f"--learner {learner} --updates 100 {chosen}", SWEEP)


def run(name: str, options: str, seed: int, out: Path) -> None:
    """One run on one thread, and its processor seconds where it was not interrupted."""
    path = out / f"{name}-{seed}"
    if (path / "results.json").exists():
        return
    is_new = not (path / "config.json").exists()
    new = [*options.split(), "--seed", str(seed), "--out", str(path)]
    command = [sys.executable, "main.py", *(new if is_new else ["--resume", str(path)])]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    print(f"{path}: {'failed' if status else 'done'}", flush=True)
    if is_new and not status:
        write_json(path / "seconds.json", {"seconds": usage.ru_utime + usage.ru_stime})


def main() -> None:
    """Run what is missing, several at a time."""
    with one_line_errors("eval.study"):
        parser = OneLineParser("python -m eval.study", description=__doc__.splitlines()[0])
        add = parser.add_argument
        add("--out", type=Path, default=Path("runs/study"), help="folder of the runs")
        add("--only", nargs="+", default=[""], metavar="NAME", help="names that begin so")
        add("--jobs", type=int, default=os.cpu_count(), help="runs at a time, a thread each")
        add("--options", default="", help="further options of every run")
        args: argparse.Namespace = parser.parse_args()
        if args.jobs < 1:
            parser.error(f"--jobs is {args.jobs}; give at least 1")
        pool = ThreadPoolExecutor(args.jobs)
        try:
            runs = []
            for name, (options, seeds) in RUNS.items():
                for seed in seeds if name.startswith(tuple(args.only)) else ():
                    given = (name, f"{options} {args.options}", seed, args.out)
                    runs.append(pool.submit(run, *given))
            for one in runs:
                one.result()
        finally:
            pool.shutdown(cancel_futures=True)  # after Ctrl-C no further run begins


if __name__ == "__main__":
    main()
