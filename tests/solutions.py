"""Solutions of docs/assignments.py: `python docs/assignments.py 1 2 3 4 5 --solved` checks them.

1. A step moves a cell by the share of words with its context: a quarter for a letter, in both
   tables, and a sixteenth for a pair, whose share is noisier, too. In a palindrome the opposite
   letter decides alone, so the sum loses little. At four times the rate pairs have 1.21 and .94.
2. The copies of particle k are binomial, with variance K W_k (1 - W_k): .96 + .84 + .64 + .36. Each
   systematic point is uniform on its own part, so particle k has K W_k copies on average.
3. Seeds 0 to 3: 4.24, 3.63, 3.86, 3.81. A number that depends on the beginning may be added to log
   psi of all next tokens: q is the same. So levels are not learned, and a run that resamples before
   T compares beginnings by chance.
4. f_T = 1, and along a path every other f_t cancels; with resampling the proof holds for psi f_t.
   With -inf a beginning dies, whose continuations have phi > 0: samples lose them, and Z-hat
   estimates the Z of a smaller target. Nothing tells.
5. w_t = p psi / (q psi before), whatever q > 0 is. Z-hat is right on average for any of them, but
   of a batch from this q fewer words count, and psi learns less. Given the past, a step keeps the
   mean whether or not it resamples; a choice by later weights would pick lucky runs. (The first
   line of the check is necessary, not sufficient: N_t / psi has this mean as well.)
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
