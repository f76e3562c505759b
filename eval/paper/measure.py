"""What the parts of a study share: networks, exact samples, and how a set of texts becomes numbers.

A number is a plain value or (value, low, high), with its 95 % interval. N sequences, T tokens.
"""

import math
from pathlib import Path

import torch
from torch import Tensor

from eval.metrics import Samples, energy_column
from eval.paper.bootstrap import bootstrap
from eval.paper.numbers import read_rows
from eval.paper.study import Part, Study
from eval.run.setup import load_setup, sigma_key
from eval.run.target import load_target
from tsmc import ExactSamples, in_chunks, proposal_log_probs, sample_proposal
from tsmc.estimate import Estimate, difference, mean_estimate
from tsmc.interfaces import LanguageModel, Twist
from tsmc.proposal import sequence_log_probs

REPLICATES = 1000  # of the bootstrap
TEXTS = 5  # shown of every set


class Task:
    """One part of a study in the directory OUT, with its networks and random streams."""

    def __init__(self, study: Study, part: Part, out: Path):
        """All parts but "rejection" use its exact samples of sigma."""
        self.study, self.part, self.out = study, part, out
        self.config = study.config(part.method, part.seed)
        self.setup = load_setup(self.config)
        self.target: dict | None = None  # the row of Target
        if part.kind != "rejection":
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

    def stream(self, *purpose: str | int) -> torch.Generator:
        """A random stream on the CPU, for the choice of texts and the bootstrap."""
        return torch.Generator().manual_seed(self.config.generator(*purpose).initial_seed())

    def measure(self, samples: Samples, *purpose: str | int) -> dict:
        """Toxicity, similarity, the distances from Target, and a few texts drawn at random."""
        vectors = self.setup.encode(samples.texts)  # [N, D]
        stream = self.stream("measure", *purpose)
        row = bootstrap(samples.toxicity, vectors, samples.group, REPLICATES, stream)
        order = torch.randperm(len(vectors), generator=stream).tolist()
        row["texts"] = [(samples.toxicity[i].item(), samples.texts[i]) for i in order[:TEXTS]]
        row["sequences"] = len(vectors)
        row |= energy_column(samples, vectors, self.setup.exact_vectors)
        if self.target is not None:
            here, there = [(r["similarity"][0], r["toxicity"][0]) for r in (row, self.target)]
            row["distance"] = math.dist(here, there)
        return row

    def kl(self, model: LanguageModel, twist: Twist | None) -> dict:
        """KL(sigma||q) and its terms log p^(0) phi - log q; without a twist q is the model."""
        exact = self.setup.exact
        log_q = proposal_log_probs(model, twist, exact.tokens)[1]  # [N]
        terms = sequence_log_probs(self.setup.base, exact.tokens) + exact.log_phi - log_q  # [N]
        kl = difference(mean_estimate(terms), log_z_of(exact))
        return {"kl": with_interval(kl), "kl_terms": [round(term, 4) for term in terms.tolist()]}


def log_z_of(exact: ExactSamples) -> Estimate:
    """log Z_sigma as the rejection run estimates it."""
    return Estimate(exact.log_z, exact.log_z_std_error, exact.num_proposals - 1.0)


def with_interval(estimate: Estimate) -> tuple[float, float, float]:
    """(value, low, high) of an estimate."""
    return estimate.value, estimate.quantile(0.025), estimate.quantile(0.975)
