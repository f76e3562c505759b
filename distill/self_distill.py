"""Self-distillation: a language model from weighted samples of the last one (eq. 7).

    argmin_p  sum_i W_i [ -log p(s_i) ] / T,   s_i = s_{1:T} after the prompt s_0

With equal weights and samples of TSMC(p^(m-1), psi^(m-1)) this is eq. 7; with importance weights of
sigma the minimum is that of KL(sigma||p). Each update sees rows drawn by their weights.

What the paper leaves open: the numbers of samples and updates and the step size, which are options.
N samples, n rows of a batch, U updates, T tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tsmc.interfaces import Report, ignore


def draw_batches(
    weights: Tensor, batch_size: int, updates: int, generator: torch.Generator
) -> Tensor:
    """Rows [U, n] of samples, drawn by their weights [N], for each of U = updates."""
    drawn = torch.multinomial(weights, updates * batch_size, replacement=True, generator=generator)
    return drawn.view(updates, batch_size)


def self_distill(
    loss: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    batches: Tensor,
    report: Report = ignore,
) -> None:
    """Minimise loss(rows [n]), a step for each row of `batches` [U, n].

    Reports the loss of every step, before the step is taken.
    """
    for rows in batches:
        value = loss(rows)
        report(loss=value.detach())
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
