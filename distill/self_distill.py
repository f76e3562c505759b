"""Self-distillation: the next generation's language model from weighted samples (eq. 7).

    p^(m) = argmin_p  sum_i W_i [ -log p(s_i) ],   s_i = s_{1:T} after the prompt s_0

With equal weights and samples of TSMC(p^(m-1), psi^(m-1)) this is eq. 7; with the weights of the
pool (`twist/pool.py`) every sequence drawn so far takes part, and for exact weights the minimum is
that of KL(sigma||p). Rows are drawn by their weights for each update. What is trained is an adapter
of p^(0) (`twist/adapter.py`), or all parameters of p^(m-1) or LoRA (`distill/finetune.py`).

What the paper leaves open: numbers of samples and updates and the step size, which are options; all
runs count the same, whatever their Z-hat; Adam for an adapter, otherwise AdamW. N samples, n rows
of a batch, T tokens, D width of the states.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tinystories.decoder import Conditional
from tsmc.interfaces import LanguageModel, Report, ignore
from twist.adapter import Adapter
from twist.pool import draw_rows, hidden_states


@dataclass
class Batch:
    """Samples; of a batch shared by several processes, the rows of this one."""

    tokens: Tensor  # [n, T]
    hidden: Tensor | None  # [n, T, D] the states that predict them, if they are computed once
    batch_size: int  # of the whole batch


def batches_of(
    samples: Tensor,
    weights: Tensor,
    batch_size: int,
    updates: int,
    generator: torch.Generator,
    model: LanguageModel | None = None,
    own: slice = slice(None),
) -> Callable[[int], Batch]:
    """Batches of samples [N, T] drawn by weights [N], with their states if a `model` is given.

    Of a batch that processes share, this one has the rows `own`.
    """
    distinct, place = draw_rows(weights, updates * batch_size, generator)
    tokens = samples[distinct]
    states = None if model is None else hidden_states(model, tokens)

    def draw_batch(update: int) -> Batch:
        rows = place[update * batch_size : (update + 1) * batch_size][own]
        return Batch(tokens[rows], None if states is None else states[rows], batch_size)

    return draw_batch


def model_loss(model: Conditional, batch: Batch) -> Tensor:
    """eq. 7, summed over the rows and divided by batch_size T: processes sum to the mean."""
    return -model.log_probs(batch.tokens)[0].sum() / (batch.batch_size * model.length)


def adapter_loss(adapter: Adapter, batch: Batch) -> Tensor:
    """The same for p^(m) = adapter, from the states of p^(0)."""
    logits = adapter(batch.hidden)  # [n, T, V]
    losses = F.cross_entropy(logits.flatten(0, 1), batch.tokens.flatten(), reduction="sum")
    return losses / (batch.batch_size * batch.tokens.shape[1])


def self_distill(
    loss: Callable[[Batch], Tensor],
    optimizer: torch.optim.Optimizer,
    draw_batch: Callable[[int], Batch],
    updates: int,
    report: Report = ignore,
) -> None:
    """Minimise the loss; reports its value at every step, before the step is taken."""
    for update in range(updates):
        value = loss(draw_batch(update))
        report(loss=value.detach())
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
