"""Self-distillation: the next generation's language model from the last one's samples (eq. 7).

    p^(m) = argmin_p  E_{s ~ TSMC(p^(m-1), psi^(m-1))} [ -log p(s_{1:T} | s_0) ],  from p^(m-1)

The N samples of T tokens come from many runs, because the particles of one run share ancestors and
hold far fewer than K distinct sequences. Few passes with a small learning rate keep the model from
overfitting them; the loss on held-out runs, reported beside the training loss, shows it.

What the paper leaves open:
 1. The number of samples, runs and updates and the rate are options; the defaults stop long before
    convergence.
 2. All runs count the same, whatever their Z-hat; within a run the final resampling has been
    applied.
 3. AdamW, without weight decay for biases and LayerNorm.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from distill.finetune import Student
from tinystories.decoder import Conditional
from tsmc.interfaces import Report, ignore
from tsmc.proposal import sequence_log_probs


@dataclass
class Batch:
    """Samples; of a batch shared by several processes, the rows of this one."""

    tokens: Tensor  # [n, T]
    batch_size: int  # of the whole batch

    def rows(self, part: slice) -> "Batch":
        """The part of one process."""
        return Batch(self.tokens[part], self.batch_size)


def hold_out(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Split runs [R, K, T]: sequences [N, T] to train on, and those of a tenth of the runs.

    A single run serves both purposes.
    """
    cut = max(1, len(samples) // 10)
    trained_on = samples[cut:] if len(samples) > cut else samples
    return trained_on.flatten(0, 1), samples[:cut].flatten(0, 1)


def batches_of(
    samples: Tensor, batch_size: int, generator: torch.Generator
) -> Callable[[int], Batch]:
    """A function that draws the batch of an update from samples [N, T]."""

    def draw_batch(update: int) -> Batch:
        size = (batch_size,)
        chosen = torch.randint(len(samples), size, generator=generator, device=samples.device)
        return Batch(samples[chosen], batch_size)

    return draw_batch


def held_out_loss(model: Conditional, tokens: Tensor) -> float:
    """Mean of -log p(s_t | s_{0:t-1}) over sequences [N, T]."""
    return -sequence_log_probs(model, tokens).mean().item() / model.length


def negative_log_likelihood(model: Conditional, tokens: Tensor, batch_size: int) -> Tensor:
    """-log p(s_t | s_{0:t-1}) summed over sequences [N, T], over batch_size T (eq. 7).

    For a whole batch, N = batch_size, it is the mean; the rows of several processes sum to it.
    """
    return -model.log_probs(tokens)[0].sum() / (batch_size * model.length)


def self_distill(
    student: Student,
    base: Conditional,
    draw_batch: Callable[[int], Batch],
    updates: int,
    report: Report = ignore,
) -> None:
    """Turn the student, a copy of p^(m-1), into p^(m); base gives its prompt and length.

    Reports the loss of every step, before the step is taken.
    """
    model = student.after(base)
    for update in range(updates):
        batch = draw_batch(update)
        loss = negative_log_likelihood(model, batch.tokens, batch.batch_size)
        report(loss=loss.detach())
        student.optimizer.zero_grad()
        loss.backward()
        student.optimizer.step()
