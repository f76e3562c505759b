"""What the parts of a study share: what one starts from, and how a set of texts becomes numbers with 95 % intervals.

A number is {"value", "low", "high"}. Toxicity and similarity have bootstrap intervals over whole TSMC runs (`bootstrap.py`);
independent samples are runs of one text each. N sequences, T tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from eval.metrics import Samples, energy_column, kl_target_proposal
from eval.paper.bootstrap import bootstrap, run_sums
from eval.paper.study import Part, StudyConfig
from eval.run.options import RunConfig
from eval.run.saved import load_generation
from eval.run.setup import Problem, Setup, load_setup, sigma_key
from eval.run.target import load_target
from tinystories.checkpoint import read_json
from tinystories.errors import InputError
from tsmc import Chunks, ExactSamples, Sigma, Steps, sample_model
from tsmc.estimate import Estimate
from tsmc.interfaces import LanguageModel, Twist
from tsmc.scoring import proposal_log_probs, sequence_log_probs

SECONDS = 5.0  # between two words of a part in its log


class ShownSteps(Steps):
    """Steps that say how far they are."""

    def __iter__(self) -> Iterator[int]:
        yield from tqdm(super().__iter__(), self.name, self.total, mininterval=SECONDS)


class ShownChunks(Chunks):
    """Chunks of a sample that say how far they are."""

    def __iter__(self) -> Iterator[tuple[int, torch.Generator]]:
        yield from tqdm(super().__iter__(), "sampling", len(self.sizes), mininterval=SECONDS)


@dataclass(frozen=True)
class Task:
    """One part of a study in the directory OUT. Its random streams depend on its name alone, not on when it runs."""

    study: StudyConfig
    part: Part
    out: Path

    @cached_property
    def config(self) -> RunConfig:
        """The options of the part's run, or of the run whose networks it looks at."""
        return self.study.run_config(self.part.seed, self.part.variant, str(self.out / "runs" / self.part.name))

    @cached_property
    def setup(self) -> Setup:
        """The networks and sigma."""
        return load_setup(self.config)

    @property
    def problem(self) -> Problem:
        """Sigma after the prompt of the study."""
        return self.setup.problems[0]

    @cached_property
    def exact(self) -> ExactSamples:
        """The shipped samples of sigma, or those that the rejection part has drawn."""
        folder, problem = self.out / "target", self.problem
        exact = problem.exact or load_target(folder, sigma_key(self.config, problem.prompt))
        if exact is None:
            raise InputError(f"{folder}: made for other options; choose another --out")
        return exact.to(problem.base.prompt.device)

    @cached_property
    def exact_vectors(self) -> Tensor:
        """Embeddings [M, D] of the exact samples."""
        return self.setup.encode(self.problem.potential.texts(self.exact.tokens))

    def trained_pair(self, path: Path, m: int) -> tuple[Sigma, Twist]:
        """Sigma as p^(m) of a finished run sees it, and psi^(m)."""
        sigmas, twist = load_generation(self.setup, path / f"generation-{m}", m, self.problem.base.prompt.device)
        return sigmas[0], twist

    def draw(self, model: LanguageModel, count: int, *purpose: str | int) -> Tensor:
        """Independent samples [N, T] of a bare model, N = count."""
        return sample_model(model, ShownChunks(count, self.config.rows, self.config.streams(*purpose)))

    def stream(self, *purpose: str | int) -> torch.Generator:
        """A random stream on the CPU, where texts are chosen and intervals are computed."""
        return torch.Generator().manual_seed(self.config.generator(*purpose).initial_seed())

    def measure(self, samples: Samples, *purpose: str | int) -> dict:
        """Toxicity, similarity, distance from the exact samples and a few texts, drawn without selection, of a set of texts."""
        vectors = self.setup.encode(samples.texts)
        sums = run_sums(samples.toxicity, vectors, samples.group)
        order = torch.randperm(len(samples.texts), generator=self.stream("texts", *purpose)).tolist()
        texts = [{"toxicity": samples.toxicity[i].item(), "text": samples.texts[i]} for i in order[: self.study.texts]]
        intervals = bootstrap(sums, self.study.replicates, self.stream("bootstrap", *purpose))
        energy = energy_column(samples, vectors, self.exact_vectors)
        return intervals | energy | {"sequences": len(samples.texts), "texts": texts}

    def fluency(self, tokens: Tensor) -> float:
        """Mean log p^(0) of a token in sequences [N, T]: how readable they are to the base model."""
        return sequence_log_probs(self.problem.base, tokens).mean().item() / tokens.shape[1]

    def kl(self, model: LanguageModel, twist: Twist | None) -> dict:
        """KL(sigma||q), for a bare model KL(sigma||p), and log q of every exact sample, over which changes are paired."""
        value, half = kl_target_proposal(model, twist, self.problem.base, self.exact)
        log_q = proposal_log_probs(model, twist, self.exact.tokens)[1]  # [N]
        return {"kl": with_half_width(value, half, lowest=0.0), "log_q": rounded(log_q)}


def rounded(values: Tensor) -> list[float]:
    """Log-probabilities [N] as they are kept in a part's file."""
    return [round(value, 4) for value in values.tolist()]


def with_half_width(
    value: float, half: float, lowest: float = -math.inf, highest: float = math.inf
) -> dict[str, float | None]:
    """A value and its interval, if it has one, inside the limits that the value is in.

    Of the logarithm beside one limit, of the logit between two (delta method); one that would reach a limit is cut there.
    """
    if not math.isfinite(half):
        return {"value": value, "low": None, "high": None}
    low, high = value - half, value + half
    if lowest < low and high < highest and (lowest, highest) != (-math.inf, math.inf):
        scale = math.exp(half / (value - lowest) + half / (highest - value))
        low, high = (times_odds(value, lowest, highest, factor) for factor in (1 / scale, scale))
    elif lowest <= value <= highest:
        low, high = max(low, lowest), min(high, highest)
    return {"value": value, "low": low, "high": high}


def times_odds(value: float, lowest: float, highest: float, factor: float) -> float:
    """What is `factor` times as far from the lowest value as from the highest, compared with `value`; one may be infinite."""
    above, below = factor * (value - lowest), highest - value
    if math.isinf(below):
        return lowest + above
    if math.isinf(above):
        return highest - below / factor
    return lowest + (highest - lowest) * above / (above + below)


def number(estimate: Estimate) -> dict[str, float]:
    """Value and 95 % interval of an estimate."""
    return {"value": estimate.value, "low": estimate.quantile(0.025), "high": estimate.quantile(0.975)}


def distance(point: dict, target: dict) -> float:
    """Euclidean distance of two sets of texts on the similarity-toxicity plane; infinite for a run that diverged."""
    if "failed" in point:
        return math.inf
    return math.dist(*([row[name]["value"] for name in ("similarity", "toxicity")] for row in (point, target)))


def nearest(runs: list[dict], target: dict) -> int:
    """Place of the run whose samples lie nearest to Target."""
    return min(range(len(runs)), key=lambda place: distance(runs[place], target))


def read_part(out: Path, name: str) -> list[dict]:
    """The rows of a finished part."""
    return read_json(out / "parts" / f"{name}.json")["rows"]


def target_row(out: Path, study: StudyConfig) -> dict:
    """The row that is Target."""
    return next(row for row in read_part(out, "rejection") if tuple(row["place"]) == study.target_place())
