"""What a study consists of: its sizes, its runs of main.py, and the files of its parts."""

import hashlib
import json
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from eval import baseline
from eval.run.options import RunConfig, read_config

LEARNERS = {"as-published": "--as-published", "default": "", "pooled": "--learner pooled"}
ABLATIONS = {
    "no-surrogate": "--learner pooled --no-surrogate",
    "no-effective-potential": "--no-effective-potential",
    "lora": "--student lora",
}
RUNS = LEARNERS | ABLATIONS  # arguments of main.py by name


@dataclass(frozen=True)
class Study:
    """What the numbers depend on, besides main.py's defaults."""

    seeds: tuple[int, ...] = (71, 72, 73, 74, 75)
    few: int = 3  # so many of the seeds serve the ablations and the baselines
    sweep_seed: int = 70  # on which the baselines' settings are chosen
    options: str = ""  # of all runs of main.py
    published: str = ""  # of those with the published learner
    pooled: str = ""  # of those with the pooled learner
    proposals: int = 50_000  # draws of p^(0) for rejection
    best_of: int = 50  # texts of p^(0), of which the best by phi is kept
    best_texts: int = 400  # so many times
    populations: tuple[int, ...] = (20, 50, 100, 1000)  # K of the paper's Fig. 2
    particles: int = 2000  # in all populations of one K
    words: int = 6  # whose shares are compared
    batch_size: int = 128  # of a baseline
    first: tuple[baseline.Setting, ...] = baseline.FIRST
    widenings: int = 4  # of a sweep, at most
    share: float = 0.25  # of the scores, for each setting of a sweep
    made_by: str = ""  # version, networks and files of potentials

    def arguments(self, method: str, seed: int) -> list[str]:
        """The options of a run of main.py, which leaves missing exact samples to the study."""
        own = RUNS.get(method, "")
        of_learner = self.pooled if "--learner pooled" in own else self.published
        fixed = f"--toxicity --eval-target-proposals 0 --quiet --seed {seed}"
        return shlex.split(f"{self.options} {of_learner} {own} {fixed}")

    def config(self, method: str, seed: int) -> RunConfig:
        """The same as a config; that of a baseline has the default's sigma and scores."""
        return read_config(self.arguments(method, seed), "")[0]


@dataclass(frozen=True)
class Part:
    """One part of a study: `kind` "target", "run", "sweep" or "baseline"."""

    name: str
    kind: str
    method: str  # of RUNS or of `baseline.METHODS`
    seed: int


def files(study: Study, part: Part, out: Path) -> tuple[Path, Path]:
    """The file of a part and the directory of its run, named by hashes of all that made them."""
    options = asdict(study.config(part.method, part.seed))
    sizes = asdict(replace(study, seeds=(), few=0))
    keys = [
        hashlib.sha256(json.dumps(made_by).encode()).hexdigest()[:12]
        for made_by in ((options, sizes), (options, study.made_by))
    ]
    return out / "parts" / f"{part.name}-{keys[0]}.json", out / "runs" / f"{part.name}-{keys[1]}"


def target_part(study: Study) -> Part:
    """The part that all others need."""
    return Part("target", "target", "default", study.sweep_seed)
