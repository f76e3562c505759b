"""What the parts of a study share: networks, exact samples, and how a set of texts becomes numbers.

A number is a plain value or (value, low, high), with its 95 % interval. All parts share the M exact
samples y of sigma. The `terms` of a row say what each y adds, so that the error of the mean of the
terms is, to first order, the error that the exact samples bring:

    kl        log p^(0)(y) + log phi(y) - log q(y)
    energy    2 mean_x |x - y| - 2 mean_y' |y' - y|

N sequences x, T tokens.
"""

import math
from pathlib import Path

import torch
from torch import Tensor

from eval import metrics
from eval.paper.numbers import read_rows
from eval.paper.study import Part, Study
from eval.run.setup import load_setup, sigma_key
from eval.run.target import load_target
from eval.scorers.similarity import mean_pairwise_cosine
from tsmc import ExactSamples, in_chunks, sample_proposal
from tsmc.estimate import Estimate
from tsmc.interfaces import LanguageModel, Twist


class Task:
    """One part of a study in the directory OUT, with its networks and random streams."""

    def __init__(self, study: Study, part: Part, out: Path):
        """All parts but "rejection" use its exact samples of sigma; longer texts have none."""
        self.study, self.part, self.out = study, part, out
        self.config = study.config(part.method, part.seed)
        self.setup = load_setup(self.config)
        self.target: dict | None = None  # the row of Target
        if part.kind != "rejection" and part.method not in study.longer():
            self.target = read_rows(out, "rejection")[-1]
            vocab_size = self.setup.model.config.vocab_size
            self.use_exact(load_target(out / "target", sigma_key(self.config), vocab_size))

    def use_exact(self, exact: ExactSamples) -> None:
        """Compare with these exact samples of sigma."""
        self.setup.exact = exact.to(self.config.torch_device())
        self.setup.exact_vectors = self.setup.encode(self.setup.potential.texts(exact.tokens))

    def draw(self, model: LanguageModel, count: int, *purpose: str | int) -> Tensor:
        """Independent samples [N, T] of a bare model, N = count."""

        def draw(size: int, generator: torch.Generator) -> dict[str, Tensor]:
            return {"tokens": sample_proposal(model, None, size, generator).tokens}

        return in_chunks(draw, count, self.config.rows, self.config.streams(*purpose))["tokens"]

    def measure(self, samples: metrics.Samples) -> dict:
        """Toxicity, similarity, and the distances from Target where there is one."""
        vectors = self.setup.encode(samples.texts)  # [N, D]
        scores = metrics.mean_scores(samples)
        toxicity, half = scores["toxicity"], scores["toxicity_half_width"]
        row = {"toxicity": (toxicity, toxicity - half, toxicity + half)}
        row |= {"similarity": mean_pairwise_cosine(vectors), "sequences": len(vectors)}
        if self.setup.exact_vectors is None:
            return row
        row |= metrics.energy_column(samples, vectors, self.setup.exact_vectors)
        row["terms"] = {"energy": energy_terms(vectors, self.setup.exact_vectors).tolist()}
        if self.target is not None:
            apart = row["similarity"] - self.target["similarity"]
            row["distance"] = math.hypot(apart, toxicity - self.target["toxicity"][0])
        return row

    def add_kl(self, row: dict, model: LanguageModel, twist: Twist | None) -> dict:
        """The row with KL(sigma||q); without a twist q is the model."""
        terms = metrics.kl_terms(model, twist, self.setup.base, self.setup.exact)
        kl = with_interval(metrics.kl_target_proposal(terms, self.setup.exact))
        return row | {"kl": kl, "terms": row["terms"] | {"kl": terms.tolist()}}


def energy_terms(x: Tensor, y: Tensor) -> Tensor:
    """The terms [M] of the energy distance of vectors x [N, D] and exact samples y [M, D]."""
    return 2 * (
        metrics.pair_distances(x, y).mean(0) - metrics.pair_distances(y, y).sum(0) / (len(y) - 1)
    )


def with_interval(estimate: Estimate) -> tuple[float, float, float]:
    """(value, low, high) of an estimate."""
    return estimate.value, estimate.quantile(0.025), estimate.quantile(0.975)
