"""Make the runs of docs/results.md, OUT/NAME-SEED; finished ones stay, those begun are resumed."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from eval.command import OneLineParser, one_line_errors
from tinystories.errors import InputError

SEEDS, FEW = (91, 92, 93, 94, 95), (91, 92, 93)
RUNS = {
    "paper": ("--learner paper --eval-particles 50 20 100 1000", SEEDS),
    "weighted": ("--learner weighted --eval-particles 50 20 100 1000", SEEDS),
    "pooled": ("--learner pooled --eval-particles 50 20 100 1000", SEEDS),
    "lora": ("--learner weighted --student lora", FEW),
    "no-effective-potential": ("--learner weighted --no-effective-potential", FEW),
    "no-surrogate": ("--learner pooled --no-surrogate", FEW),
    "dpo-full": ("--learner dpo", FEW),
    "dpo-lora": ("--learner dpo --student lora --learning-rate 1e-3", FEW),
    "grpo-full": ("--learner grpo", FEW),
    "grpo-lora": ("--learner grpo --student lora --learning-rate 3.2e-3", FEW),
    "beta-1": ("--learner pooled --generations 0 --beta 1", FEW[:1]),
}
WORDS = ("cheese", "hurricane", "university", "earthquake", "donkey", "accidents", "telescope")
WORDS += ("electricity", "cheese+hurricane", "donkey+earthquake", "cheese+university")
WORDS += ("telescope+electricity", "cheese+hurricane+donkey")
for words in WORDS:
    flags = " --potential keyword:".join(["--learner pooled --generations 1", *words.split("+")])
    RUNS[words] = f"{flags} --eval-target-proposals 0", (96, 97, 98)
for n in (70, 140, 280):
    RUNS[f"paper-{n}"] = f"--learner paper --ctl-updates {n}", (61,)
    RUNS[f"weighted-{n}"] = f"--learner weighted --ctl-updates {n}", (61,)


def run(path: Path) -> bool:
    """Begin or resume the run NAME-SEED; whether it has finished."""
    name, _, seed = path.name.rpartition("-")
    options = [*RUNS[name][0].split(), "--seed", seed, "--out", str(path)]
    if (path / "config.json").exists():
        options = ["--resume", str(path)]
    done = subprocess.run([sys.executable, "main.py", *options], stdout=subprocess.DEVNULL)
    print(f"{path}: {'failed' if done.returncode else 'done'}", flush=True)
    return done.returncode == 0


def main() -> None:
    """Make what is missing, several at a time; Ctrl-C ends the map, and no further run begins."""
    with one_line_errors("eval.study"):
        parser = OneLineParser("python -m eval.study", description=__doc__)
        parser.add_argument("--out", type=Path, default=Path("runs/study"), help="their folder")
        parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), help="names")
        parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a thread each")
        args = parser.parse_args()
        os.environ["OMP_NUM_THREADS"] = "1"
        paths = [args.out / f"{name}-{seed}" for name in args.only for seed in RUNS[name][1]]
        missing = [path for path in paths if not (path / "results.json").exists()]
        with ThreadPoolExecutor(max(1, args.jobs)) as pool:
            failed = list(pool.map(run, missing)).count(False)
        if failed:
            raise InputError(f"{failed} runs failed, see above; mend them and start again")


if __name__ == "__main__":
    main()
