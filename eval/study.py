"""The experiments of docs/results.md: commands of main.py, `python -m eval.study --out runs/study`.

A run lies in OUT/NAME-SEED. What is finished is skipped and what was begun is resumed, so the same
command goes on where it was ended; --only NAME chooses. `python -m eval.report` makes the tables.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from eval.command import OneLineParser, one_line_errors
from tinystories.errors import InputError

SEEDS, FEW, TUNING = (91, 92, 93, 94, 95), (91, 92, 93), (61,)
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
    "beta-1": ("--learner pooled --generations 0 --beta 1", FEW[:1]),
}
for updates in (70, 140, 280):
    for learner in ("paper", "weighted"):
        RUNS[f"{learner}-{updates}"] = f"--learner {learner} --ctl-updates {updates}", TUNING


def run(name: str, seed: int, out: Path) -> bool:
    """One run on one thread; whether it has finished."""
    path = out / f"{name}-{seed}"
    if (path / "results.json").exists():
        return True
    new = [*RUNS[name][0].split(), "--seed", str(seed), "--out", str(path)]
    is_begun = (path / "config.json").exists()
    command = [sys.executable, "main.py", *(["--resume", str(path)] if is_begun else new)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL).returncode == 0
    print(f"{path}: {'done' if done else 'failed'}", flush=True)
    return done


def main() -> None:
    """Run what is missing, several at a time."""
    with one_line_errors("eval.study"):
        parser = OneLineParser("python -m eval.study", description=__doc__.splitlines()[0])
        add = parser.add_argument
        add("--out", type=Path, default=Path("runs/study"), help="folder of the runs")
        add("--only", nargs="+", choices=RUNS, default=list(RUNS), help="some of the names")
        add("--jobs", type=int, default=2, help="runs at a time, a thread each")
        args = parser.parse_args()
        pool = ThreadPoolExecutor(max(1, args.jobs))
        try:
            runs = [pool.submit(run, n, seed, args.out) for n in args.only for seed in RUNS[n][1]]
            failed = [one for one in runs if not one.result()]
        finally:
            pool.shutdown(cancel_futures=True)  # after Ctrl-C no further run begins
        if failed:
            raise InputError(f"{len(failed)} runs failed, see above; mend them and start again")


if __name__ == "__main__":
    main()
