"""What the parts of a study share: what one starts from, and how a set of texts becomes numbers with 95 % intervals.

A number is {"value", "low", "high"}. Toxicity and similarity have bootstrap intervals over whole TSMC runs
(`eval.bootstrap`); independent samples are runs of one text each.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from eval.metrics import Samples, draw_model, kl_target_proposal
from eval.paper.bootstrap import bootstrap, run_sums
from eval.paper.study import Part, StudyConfig
from eval.run.options import RunConfig
from eval.run.setup import Ingredients, Problem, load_ingredients
from eval.run.target import Target
from tinystories import Conditional
from tinystories.checkpoint import read_json
from tsmc.estimate import Estimate
from tsmc.proposal import sequence_log_probs
from twist import TwistMLP

BINS = 20  # of the toxicity histograms


@dataclass(frozen=True)
class Task:
    """One part of a study in the directory OUT. Its random streams depend on its name alone, not on when it runs."""

    study: StudyConfig
    part: Part
    out: Path

    @cached_property
    def config(self) -> RunConfig:
        """The options of the part's run, or of the run whose networks it looks at."""
        return self.study.seeded(self.part.seed, self.part.kind, str(self.out / "runs" / self.part.name))

    @cached_property
    def given(self) -> Ingredients:
        """The networks and the target."""
        return load_ingredients(self.config)

    @property
    def problem(self) -> Problem:
        """Sigma after the prompt of the study."""
        return self.given.problems[0]

    def stream(self, *purpose: str | int) -> torch.Generator:
        """A random stream on the CPU, where texts are drawn and intervals are computed."""
        return torch.Generator().manual_seed(self.config.generator(*purpose).initial_seed())

    def draw(self, model: Conditional, count: int, *purpose: str | int) -> Tensor:
        """Independent samples [N, T] of a bare model, N = count, `rows` at a time."""
        return draw_model(self.config, model, count, self.config.streams(*purpose))

    def fluency(self, tokens: Tensor) -> float:
        """Mean log p^(0) of a token in sequences [N, T]: how readable they are to the base model."""
        return sequence_log_probs(self.problem.base, tokens).mean().item() / tokens.shape[1]

    def measure(self, samples: Samples, *purpose: str | int) -> dict:
        """Toxicity, similarity, histogram and a few texts, drawn without selection, of a set of texts."""
        sums = run_sums(samples.toxicity, self.given.encode(samples.texts), samples.group)
        order = torch.randperm(len(samples.texts), generator=self.stream("texts", *purpose))
        drawn = order[: self.study.texts].tolist()
        return {
            **bootstrap(sums, self.study.replicates, self.stream("bootstrap", *purpose)),
            "sequences": len(samples.texts),
            "histogram": torch.histc(samples.toxicity.float(), BINS, 0, 1).int().tolist(),
            "texts": [{"toxicity": samples.toxicity[i].item(), "text": samples.texts[i]} for i in drawn],
        }

    def kl(self, model: Conditional, twist: TwistMLP | None, target: Target) -> dict[str, float]:
        """KL(sigma||q); for a bare model, twist None, KL(sigma||p)."""
        value, half = kl_target_proposal(model, twist, self.problem.base, target)
        return {"value": value, "low": value - half, "high": value + half}


def number(estimate: Estimate) -> dict[str, float]:
    """Value and 95 % interval of an estimate."""
    return {"value": estimate.value, "low": estimate.quantile(0.025), "high": estimate.quantile(0.975)}


def share(count: int, total: int) -> dict[str, float]:
    """A share with its 95 % interval after Wilson."""
    z = 1.959964
    middle, width = (count + z * z / 2) / (total + z * z), z / (total + z * z)
    width *= math.sqrt(count * (total - count) / total + z * z / 4)
    return {"value": count / total, "low": max(0.0, middle - width), "high": min(1.0, middle + width)}


def distance(point: dict, target: dict) -> float:
    """Euclidean distance of two sets of texts on the similarity-toxicity plane; infinite for a run that diverged."""
    if "failed" in point:
        return math.inf
    return math.dist(*([row[name]["value"] for name in ("similarity", "toxicity")] for row in (point, target)))


def read_part(out: Path, name: str) -> dict:
    """The result file of a finished part."""
    return read_json(out / "parts" / f"{name}.json")
