"""Solutions of docs/assignments.py: `python docs/assignments.py 1 2 3 4 5 --solved` checks them.

1. The sum learns each letter's effect from all 100 words, the table of pairs each pair's from the
   few that have it. In a palindrome the opposite letter decides alone, so the sum loses little.
2. The copies of particle k are binomial, with variance K W_k (1 - W_k): .96 + .84 + .64 + .36. Each
   systematic point is uniform on its own part, so particle k has K W_k copies on average.
3. A number that depends on the beginning may be added to log psi of all next tokens: q is the same.
   So levels are not learned, and a run that resamples before T compares beginnings by chance.
4. f_T = 1, and in the product of the weights every other f_t cancels. With -inf a beginning dies,
   whose continuations have phi > 0: sigma loses them, and nothing tells.
5. w_t = p psi / (q psi before), whatever q is. Z-hat is right on average for any q, but its runs
   and the words that psi learns from are worth less: that is what ESS counts.
"""

import re

import torch

from docs import tiny
from tsmc.draws import invert, normalise, uniforms


def opposite(letters):
    i = tiny.T - 1 - len(letters)
    return letters[i] if i < len(letters) else tiny.V


def stratified(weights, generator):
    points = uniforms(*weights.shape, generator) + torch.arange(weights.shape[1])
    return invert(weights, points / weights.shape[1])


def twist_loss(psi, batch, model):
    drawn = batch.drawn
    log_p = model.head(drawn.hidden).log_softmax(-1)  # [K, T, V]
    log_q = (log_p + psi(drawn.hidden)).log_softmax(-1)  # [K, T, V]
    log_q = log_q.gather(2, drawn.tokens[..., None]).squeeze(2).sum(1)  # [K]
    return -(normalise(batch.log_positive()) * log_q).sum()


def prefix_cost(texts):
    return [-float(len(re.findall(r"[A-Za-z]{5,}(?=[^A-Za-z])", text))) for text in texts]


def log_weights(log_p, log_psi, log_q, prefixes, parents):
    return (log_p + log_psi - log_q)[prefixes] - log_psi[parents]
