"""Solutions of docs/assignments.py: `python docs/assignments.py 1 2 3 4 5 --solved` checks them.

1. The sum learns each letter's effect from all 100 words, the table of pairs each pair's from the
   few that have it. In a palindrome the opposite letter decides alone, so the sum loses little.
2. The copies of particle k are binomial, with variance K W_k (1 - W_k): .96 + .84 + .64 + .36. Each
   systematic point is uniform on its own part, so particle k has K W_k copies on average.
3. Seeds 0 to 3: 4.24, 3.63, 3.86, 3.81. A number that depends on the beginning may be added to log
   psi of all next tokens: q is the same. So levels are not learned, and a run that resamples before
   T compares beginnings by chance.
4. f_T = 1, and in the product of the weights every other f_t cancels. With -inf a beginning dies,
   whose continuations have phi > 0: sigma loses them, and nothing tells.
5. w_t = p psi / (q psi before), whatever q is. Z-hat is right on average for any q, but its runs
   and the words that psi learns from are worth less: that is what ESS counts. Given the past, a
   step keeps the mean whether or not it resamples; a choice by later weights would pick lucky runs.
"""

import re

import torch

from docs import tiny
from tsmc.draws import effective_sample_size, invert, log_mean_exp, multinomial, normalise, uniforms


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


def sampler(log_p, log_psi, log_q, runs, particles, generator):
    prefixes = torch.zeros(runs, particles, dtype=torch.long)
    log_w, log_z = log_p.new_zeros(runs, particles), log_p.new_zeros(runs)
    for t in range(1, tiny.T + 1):
        parents, prefixes = prefixes, tiny.extend(prefixes, log_q, generator)
        log_w = log_w + log_weights(log_p, log_psi, log_q, prefixes, parents)
        is_due = (effective_sample_size(log_w) < particles / 2) | (t == tiny.T)  # [R]
        log_z = torch.where(is_due, log_z + log_mean_exp(log_w), log_z)
        drawn = prefixes.gather(1, multinomial(normalise(log_w), generator))
        prefixes = torch.where(is_due[:, None], drawn, prefixes)
        log_w = torch.where(is_due[:, None], 0.0, log_w)
    return prefixes, log_z
