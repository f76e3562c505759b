"""What the baselines share: a policy pi that is trained from p^(0), from new texts for each update.

DPO and GRPO are the paper's. Its appendix ("Optimization") has their options, and tunes step size,
decay and strength on grids. RL aims at sigma itself. N sequences.
"""

import abc
from dataclasses import dataclass

import torch

from distill.finetune import Student
from distill.learner import Learner
from distill.options import option
from distill.pair import Pair
from tinystories.decoder import Conditional
from tsmc.processes import progress
from tsmc.sigma import seen_from
from twist.ctl import Batch, draw_batch

ROWS = 256  # sequences of one forward and backward pass, to bound the memory of logits


@dataclass(frozen=True)
class PolicyOptions:
    student: str = option("full", "what is fine-tuned", choices=("full", "lora"))
    learning_rate: float = option(1e-4, "AdamW's step size", high=1)
    updates: int = option(398, "gradient steps of a generation")
    batch_size: int = option(128, "N, sequences drawn for one update")


@dataclass(frozen=True)
class BaselineOptions(PolicyOptions):
    strength: float = option(0.4, "b, how strongly the policy is held to p^(0)")


class Baseline(Learner):
    """A policy that is trained from p^(0).

    Generation 0 is the trained policy, and each further one goes on from the last. There is no
    twist, so no weight corrects its samples.
    """

    generations = 0
    samples_policy = True

    def first_twist(self) -> Pair:
        return Pair(self.distil(Pair(self.base, None), 0), None)

    def distil(self, pair: Pair, m: int) -> Conditional:
        """The policy of generation m, trained from that of `pair`."""
        options = self.options
        generator = self.streams.stream("fine-tuning", m)
        is_lora = options.student == "lora"
        student = Student(pair.model.network, options.learning_rate, is_lora, generator)
        for _ in progress(options.updates, "fine-tuning", m):
            figures = self.update(student, generator)
            self.record("fine-tuning", m, **figures)
        return self.base.with_network(student.finish(m))

    def draw(self, model: Conditional, generator: torch.Generator) -> Batch:
        """N = batch_size texts of a model, with log phi [N]."""
        sigma = seen_from(model, self.base, self.log_phi, is_effective=False)  # phi itself
        return draw_batch(sigma, None, self.options.batch_size, generator)

    @abc.abstractmethod
    def update(self, student: Student, generator: torch.Generator) -> dict[str, float]:
        """One update of the student from a new batch; returns figures such as its loss."""

    def scored(self, m: int) -> int:
        return (m + 1) * self.options.updates * self.options.batch_size
