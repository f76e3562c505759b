"""The surrogate of phi: how much each token contributes, learned from every text that was scored.

    y(s) = phi(s)^(1/c),   logit y(s) ~ b + sum of g(v) over the different tokens v of s
    g(v) = d(v) + e(v) w
    d, w, b = argmin  sum_i cross-entropy(y_i, b + sum g) + (|d|^2 + |w|^2) / 20

phi is rare under p, so only a few draws have a weight; but all of them have a score, and this
logistic regression learns from all scores alike. c >= 1 is the least for which y has an ESS of half
of the texts, so that labels differ. Of a large vocabulary most tokens occur once or never: they
share w with tokens whose output embeddings e(v) of p^(0), centred and with a mean of |e|^2 of one,
are similar; d(v) is what embeddings do not tell.

The learned networks may use g or not (`adapter.py`): the importance weights contain phi
itself, so sigma stays the target whatever g is. N texts, T tokens, V vocabulary, D width, S tokens
that occur.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from distill.pooled.pool import Round, tempered
from tinystories.gpt_neo import at_least_float32

SPREAD = 10**0.5  # standard deviation of d and of e w under the prior that the penalty is
LEAST_ESS = 0.5  # of y, as a share of the texts with phi > 0
ITERATIONS = 60  # of L-BFGS


def fit_surrogate(
    tokens: Tensor, log_phi: Tensor, embeddings: Tensor | None, vocab_size: int
) -> Tensor:
    """The scores g [V] of texts [N, T] with log phi [N]; without embeddings [V, D], g = d."""
    power = tempered(Round(tokens, log_phi, log_phi), LEAST_ESS)[1]  # 1 / c
    labels = (power * log_phi).exp().clamp(max=1.0).float()  # [N]
    # A token that occurs twice counts once: what matters is whether a text has it.
    ordered = tokens.sort(1).values  # [N, T]
    is_first = F.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0), value=True)  # of equal tokens
    used, place = ordered.unique(return_inverse=True)  # [S], [N, T]
    if embeddings is None:
        embeddings = labels.new_zeros(vocab_size, 1)
    centred = at_least_float32(embeddings) - at_least_float32(embeddings[used]).mean(0)  # [V, D]
    length = centred.square().sum(1).mean().sqrt()
    embeddings = centred / length.clamp(min=1e-12)  # e [V, D]
    of_used = embeddings[used]  # [S, D]
    own = embeddings.new_zeros(len(used), 1).requires_grad_(True)  # d / SPREAD
    weights = embeddings.new_zeros(embeddings.shape[1], 1).requires_grad_(True)  # w / SPREAD
    # From the base rate, L-BFGS needs no steps to find that nearly all labels are zero.
    start = labels.mean().clamp(1e-6, 1 - 1e-6).logit()
    intercept = start.clone().requires_grad_(True)  # b
    # With longer embeddings w would be stiffer than d, which 60 iterations then hardly move.
    settings = {"max_iter": ITERATIONS, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS([own, weights, intercept], **settings)

    def loss() -> Tensor:
        optimizer.zero_grad()
        scores = SPREAD * (own + of_used @ weights)  # [S, 1]
        sums = (F.embedding(place, scores).squeeze(2) * is_first).sum(1)  # [N]
        entropy = F.binary_cross_entropy_with_logits(sums + intercept, labels, reduction="sum")
        total = (own.square().sum() + weights.square().sum()) / 2 + entropy
        total.backward()
        return total.detach()

    optimizer.step(loss)
    with torch.no_grad():
        scores = SPREAD * (embeddings @ weights).index_add(0, used, own)  # [V, 1]
    return scores.squeeze(1)
