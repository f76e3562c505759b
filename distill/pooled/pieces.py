"""Pieces: what forced draws set into texts (`forced.py`), and how often.

Each of F factors has hints, strings of tokens of which a text with phi > 0 is likely to hold one.
Hints overlap: where "red ball" stands, "ball" stands too. So a piece i is a string b_i of L_i
tokens and the set B_i of factors that it serves: a hint of one factor, or hints of several that
overlap and agree where they do.

Its weight v_i > 0 may be any number; a good one follows what p writes. With r_i, how likely p
writes b_i rather than a hint of each of the k factors in B_i apart, and R, the sum of r over the n
pieces that serve B_i,

    v_i = min(R, T^(k-1)) (.8 r_i / R + .2 / n),   r_i = exp(E[log p(b_i)] - sum over j of log P_j)

where P_j sums exp E[log p(b)] over the hints of factor j, and E is the mean over places by chance
in a few texts of p. There are about T^(k-1) times as many ways to place hints apart. T tokens, I
pieces, C contexts.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tinystories.decoder import Conditional
from tsmc.draws import uniforms
from tsmc.proposal import DRAWN, walk

EVEN = 0.2  # share of v that is the same for pieces of the same factors
CONTEXTS = 8  # texts in which p says how likely a piece is
MOST_TEXTS = 512  # of all pieces together, so that many hints do not take long
MOST_MERGED = 200  # pieces of several factors; plain draws find texts with others
Hints = Sequence[Sequence[Sequence[int]]]  # of each factor
Piece = tuple[tuple[int, ...], int]  # b, and B as a number whose bit j is factor j


def find_pieces(hints: Hints, length: int) -> list[Piece]:
    """All hints, and what they merge into, of at most T = length tokens."""
    singles = [(tuple(hint), 1 << j) for j, some in enumerate(hints) for hint in some]
    singles = [piece for piece in dict.fromkeys(singles) if len(piece[0]) <= length]
    pieces, known = singles.copy(), set(singles)
    for a, served in pieces:  # which grows: hints that overlap join from left to right
        for (b, own), start in itertools.product(singles, range(len(a))):
            shared = a[start : start + len(b)]
            piece = a + b[len(shared) :], served | own
            is_new = not served & own and shared == b[: len(shared)] and piece not in known
            if is_new and len(piece[0]) <= length and len(known) < len(singles) + MOST_MERGED:
                known.add(piece)
                pieces.append(piece)
    return pieces


def weigh(
    model: Conditional, pieces: Sequence[Piece], factors: int, generator: torch.Generator
) -> Tensor:
    """log v [I] of pieces of F = factors factors."""
    contexts = max(1, min(CONTEXTS, MOST_TEXTS // len(pieces)))  # C
    tokens = torch.full((len(pieces), contexts, model.length), DRAWN, device=generator.device)
    for rows, (b, _) in zip(tokens, pieces, strict=True):
        start = uniforms(contexts, 1, generator) * (model.length - len(b) + 1)
        places = start.long() + torch.arange(len(b), device=start.device)  # [C, L]
        rows.scatter_(1, places, rows.new_tensor(b).expand(contexts, -1))
    tokens = tokens.flatten(0, 1)  # [I C, T]
    uniform = uniforms(len(tokens), model.length, generator)
    log_p = walk(model, None, uniform, tokens).log_p.double()
    likely = log_p.where(tokens != DRAWN, 0.0).sum(1).view(-1, contexts).mean(1).clamp(min=-1e9)
    serves = likely.new_tensor([[own >> j & 1 for j in range(factors)] for _, own in pieces])
    size = serves.sum(1)  # [I] k
    hint = serves.bool() & (size == 1)[:, None]  # [I, F]
    apart = likely[:, None].where(hint, -torch.inf).logsumexp(0)  # [F] any hint of a factor
    ratio = likely - serves @ apart  # [I]
    same = (serves[:, None] == serves).all(2)  # [I, I] whether two serve the same factors
    total = ratio.expand_as(same).where(same, -torch.inf).logsumexp(1)  # [I]
    share = (1 - EVEN) * (ratio - total).exp() + EVEN / same.sum(1)
    return share.log() + total.minimum(math.log(model.length) * (size - 1))
