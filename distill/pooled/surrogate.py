"""The surrogate of phi: how much each token contributes, learned from every text that was scored.

    y(s) = min(1, phi(s)^(1/c)),   logit y(s) ~ b + sum of g[v] over the different tokens v of s
    g, b = argmin  sum_i cross-entropy(y_i, b + sum g) + |g|^2 / 200

phi is rare under p, so only a few draws have a weight; but all of them have a score, and this
logistic regression learns from all scores alike. It adds one number g[v] for each token v to the
embeddings (`adapter.py`), which the learned networks may use or not: the importance weights
contain phi itself, so sigma stays the target whatever g is. For the classifier, c = beta makes y =
p(toxic | s). N texts, T tokens, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

PENALTY = 0.01  # of |g|^2 / 2: small beside the loss, and enough to bound g for unseen tokens
ITERATIONS = 60  # of L-BFGS


def fit_surrogate(tokens: Tensor, log_phi: Tensor, scale: float, vocab_size: int) -> Tensor:
    """The scores g [V] of texts [N, T] with log phi [N], where c = scale."""
    labels = (log_phi / scale).exp().clamp(max=1.0).float()  # [N]
    # A token that occurs twice counts once: what matters is whether a text has it.
    ordered = tokens.sort(1).values  # [N, T]
    is_first = F.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0), value=True)  # of equal tokens
    counts = is_first.float()
    scores = torch.zeros(vocab_size, 1, device=tokens.device, requires_grad=True)  # g
    # From the base rate, L-BFGS needs no steps to find that nearly all labels are zero.
    start = labels.mean().clamp(1e-6, 1 - 1e-6).logit()
    intercept = start.clone().requires_grad_(True)  # b
    settings = {"max_iter": ITERATIONS, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS([scores, intercept], **settings)

    def loss() -> Tensor:
        optimizer.zero_grad()
        sums = F.embedding_bag(ordered, scores, per_sample_weights=counts, mode="sum")  # [N, 1]
        logits = sums.squeeze(1) + intercept
        entropy = F.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        total = PENALTY / 2 * scores.square().sum() + entropy
        total.backward()
        return total.detach()

    optimizer.step(loss)
    return scores.detach().squeeze(1)
