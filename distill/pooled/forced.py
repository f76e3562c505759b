"""Forced draws: texts of p that hold given words wherever chance puts them, with their density.

A hint b_j is L_j tokens that a text with phi > 0 is likely to hold. In a forced draw each of F
hints stands at a place of its own, no two places overlap, and p draws all other tokens. Every
placement, an order of the hints and the gaps around them, is as likely as any other:

    M = F! C(G + F, F) = (G + F)! / G!  placements,  G = T - sum_j L_j
    q(s) / p(s) = 1/M  sum over the placements that s agrees with of 1 / prod p(forced tokens)

Let f_t(A) be this sum over placements of the hints A in s_{1:t}. The last of them ends somewhere:

    f_t({}) = 1,   q(s) / p(s) = f_T(all hints) / M
    f_t(A) = sum over u <= t and j in A with s_{u-L_j+1:u} = b_j of  f_{u-L_j}(A - j) / prod p(b_j)

A place behind the end of a text does not exist: what a placement forces there is not written, so
there every text agrees, with p = 1. Of N draws n are plain draws of p, which bound the weights and
find texts without the hints. Where a factor has several words, they take turns: the other draws
are n_i of each turn's q_i. All weights divide by the mean density of the N draws, a mixture, so
E[1/N sum w u] = sum_s p(s) phi(s) u(s) for every u:

    w(s) = p(s) phi(s) / (n/N p(s) + sum_i n_i/N q_i(s)) <= phi(s) N/n

N texts, T tokens. Time and memory grow with 2^F.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tinystories.decoder import Conditional, End, counted
from tsmc.draws import uniforms
from tsmc.proposal import DRAWN, complete
from twist.potential import MOST_HINTS

PLAIN = 0.1  # share of plain draws


@torch.no_grad()
def forced_draws(
    model: Conditional,
    turns: Sequence[Sequence[Sequence[int]]],
    count: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """N = count texts [N, T] of the mixture, and log of its density over that of p [N] float64.

    `turns` are sets of hints. The plain draws come first. ValueError for too many hints, or too
    long ones.
    """
    uniform = uniforms(count, model.length, generator)
    tokens = torch.full_like(uniform, DRAWN, dtype=torch.long)  # [N, T]
    for turn, hints in enumerate(turns):
        size = sum(len(hint) for hint in hints)
        if size > model.length or len(hints) > MOST_HINTS:
            fault = f"{len(hints)} hints of {size} tokens in all cannot be forced"
            raise ValueError(f"{fault}; give at most {MOST_HINTS} hints and {model.length} tokens")
        own = tokens[turn :: len(turns)]  # [n, T]
        # Of G + F slots each hint takes one, whatever its length; the others are for tokens of p.
        order = uniforms(len(own), model.length - size + len(hints), generator).argsort(1)
        slots = order[:, : len(hints)]  # [n, F]
        extra = slots.new_tensor([len(hint) - 1 for hint in hints])  # [F]
        for j, hint in enumerate(hints):
            start = slots[:, j] + ((slots < slots[:, j : j + 1]) * extra).sum(1)  # [n]
            places = start[:, None] + torch.arange(len(hint), device=start.device)  # [n, L]
            own.scatter_(1, places, slots.new_tensor(hint).expand(len(own), -1))
    plain = max(1, round(PLAIN * count))
    tokens[:plain] = DRAWN

    tokens, log_p = complete(model, tokens, uniform)  # [N, T], [N, T]
    # The shares are those drawn, not PLAIN, so that rounding leaves the weights exact.
    turn_of = torch.arange(plain, count, device=tokens.device) % len(turns)
    sizes = [plain, *turn_of.bincount(minlength=len(turns)).tolist()]
    log_plain, *log_shares = (uniform.new_tensor(sizes) / count).log()
    log_ratio = log_plain
    for log_share, hints in zip(log_shares, turns, strict=True):
        if log_share == -torch.inf:  # a turn without draws
            continue
        log_q = forced_log_ratio(tokens, log_p, hints, model.end)  # over log p [N]
        log_ratio = log_ratio.logaddexp(log_share + log_q)
    return tokens, log_ratio


def forced_log_ratio(
    tokens: Tensor, log_p: Tensor, hints: Sequence[Sequence[int]], end: End
) -> Tensor:
    """log q(s) / p(s) [N] float64 of any tokens [N, T] with log p(s_t | s_{0:t-1}) [N, T]."""
    log_p, is_behind = log_p.double(), ~counted(tokens, end)  # [N, T]
    gains = []  # of each hint [N, T - L + 1]: -log p of its tokens where s agrees with it
    for hint in hints:
        is_met = tokens.unfold(1, len(hint), 1) == tokens.new_tensor(hint)  # [N, T - L + 1, L]
        agrees = (is_met | is_behind.unfold(1, len(hint), 1)).all(2)
        gain = -log_p.unfold(1, len(hint), 1).sum(2)
        gains.append(gain.where(agrees, -torch.inf))
    nothing = log_p.new_full((len(tokens), tokens.shape[1] + 1), -torch.inf)  # [N, T + 1]
    log_f = [torch.zeros_like(nothing)]  # f_0 to f_T of each set A, in which hint j is bit j
    for chosen in range(1, 2 ** len(hints)):
        last = nothing.clone()  # the terms of f in which the last hint ends at t
        for j, hint in enumerate(hints):
            if chosen >> j & 1:
                before = log_f[chosen - 2**j][:, : -len(hint)]
                last[:, len(hint) :] = last[:, len(hint) :].logaddexp(before + gains[j])
        log_f.append(last.logcumsumexp(1))
    gaps = tokens.shape[1] - sum(len(hint) for hint in hints)
    log_ratio = log_f[-1][:, -1] - math.log(math.perm(gaps + len(hints), len(hints)))
    # A text that p cannot write has weight zero.
    return log_ratio.where(log_p.sum(1) > -torch.inf, torch.inf)
