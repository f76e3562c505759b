"""Forced draws: texts of p that hold given words wherever chance puts them, with their density.

Pieces are strings b_i of L_i tokens, each a hint of one factor or hints of several that overlap,
with the set B_i of factors that it serves and a weight v_i (`pieces.py`). A placement is a row of
pieces and free tokens, T tokens in all, that serves each of F factors once. It is drawn in
proportion to its prod v_i, and p draws the free tokens. What comes last in t tokens that serve the
set A is a free token or a piece, so

    c_t({}) = 1,   c_t(A) = c_{t-1}(A) + sum over i with B_i in A of v_i c_{t-L_i}(A - B_i)

is the sum of prod v_i over their placements. Let f be that of the placements which s agrees with,
with v_i / prod p(b_i) in place of v_i. All hints that s holds are pieces, once merged, so

    q(s) / p(s) = f_T(all) / c_T(all),   positive wherever s holds a hint of each factor

A place behind the end of a text does not exist: what a placement forces there is not written, so
there every text agrees, with p = 1.

Of N draws n are plain draws of p, which bound the weights and find texts without the hints. All
weights divide by the mean density of the N draws, a mixture, so E[1/N sum w u] = sum_s p(s) phi(s)
u(s) for every u:

    w(s) = p(s) phi(s) / (n/N p(s) + (1 - n/N) q(s)) <= phi(s) N/n

N texts, T tokens, I pieces. Time and memory grow with 2^F.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from distill.pooled.pieces import Hints, Piece, find_pieces, weigh
from tinystories.decoder import Conditional, End, counted
from tsmc.draws import invert, normalise, uniforms
from tsmc.proposal import DRAWN, walk

PLAIN = 0.1  # share of plain draws


class Placements:
    """The placements in T = length tokens of I pieces with log v [I] that serve F factors."""

    def __init__(self, pieces: Sequence[Piece], log_v: Tensor, factors: int, length: int):
        self.pieces = pieces
        self.log_v = log_v
        self.factors = factors
        nothing = log_v.new_zeros(1, length + 1)
        self.log_c = torch.cat(self.log_sums(log_v[:, None, None], nothing))  # [2^F, T + 1]

    def log_sums(self, gains: Sequence[Tensor] | Tensor, of_none: Tensor) -> list[Tensor]:
        """log f_0 to log f_T [N, T + 1] of each set of factors, from that of none.

        A piece that ends at L to T has gains [N, T - L + 1].
        """
        log_f = [of_none]
        for served in range(1, 2**self.factors):
            last = torch.full_like(of_none, -torch.inf)  # the terms in which a piece ends at t
            for (b, own), gain in zip(self.pieces, gains, strict=True):
                if served & own == own:
                    before = log_f[served - own][:, : -len(b)]
                    last[:, len(b) :] = last[:, len(b) :].logaddexp(before + gain)
            log_f.append(last.logcumsumexp(1))
        return log_f

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """n = count placements: tokens [n, T], DRAWN where they are free."""
        log_c, choices = self.log_c, [*self.pieces, ((DRAWN,), 0)]  # a free token at last
        log_shares = log_c.new_full((*log_c.shape, len(choices)), -torch.inf)  # [2^F, T + 1, I + 1]
        log_shares[:, 1:, -1] = log_c[:, :-1]
        for i, (b, own) in enumerate(self.pieces):
            sets = torch.tensor([a for a in range(len(log_c)) if a & own == own])
            log_shares[sets, len(b) :, i] = log_c[sets - own, : -len(b)] + self.log_v[i]
        shares, uniform = normalise(log_shares), uniforms(count, log_c.shape[1] - 1, generator)
        tokens = torch.full_like(uniform, DRAWN, dtype=torch.long)  # [n, T]
        left = torch.full_like(tokens[:, 0], len(log_c) - 1)  # [n] factors to serve
        end = torch.full_like(left, tokens.shape[1])  # [n] before this place
        for t in range(tokens.shape[1], 0, -1):
            last = invert(shares[left, t], uniform[:, t - 1 : t])[:, 0]  # [n]
            for i in last[end == t].unique().tolist():
                b, own = choices[i]
                rows = (last == i) & (end == t)
                tokens[rows, t - len(b) : t] = tokens.new_tensor(b)
                left[rows] -= own
                end[rows] -= len(b)
        return tokens

    def log_ratio(self, tokens: Tensor, log_p: Tensor, end: End) -> Tensor:
        """log q(s) / p(s) [N] float64 of any tokens [N, T], log p(s_t | s_{0:t-1}) [N, T]."""
        log_p, is_behind = log_p.double(), ~counted(tokens, end)  # [N, T]
        gains = []  # of each piece [N, T - L + 1]
        for (b, _), log_v in zip(self.pieces, self.log_v, strict=True):
            is_met = tokens.unfold(1, len(b), 1) == tokens.new_tensor(b)  # [N, T - L + 1, L]
            agrees = (is_met | is_behind.unfold(1, len(b), 1)).all(2)
            gain = log_v - log_p.unfold(1, len(b), 1).sum(2)
            gains.append(gain.where(agrees, -torch.inf))
        of_none = log_p.new_zeros(len(tokens), tokens.shape[1] + 1)
        log_ratio = self.log_sums(gains, of_none)[-1][:, -1] - self.log_c[-1, -1]
        # A text that p cannot write has weight zero.
        return log_ratio.where(log_p.sum(1) > -torch.inf, torch.inf)


def forced_draws(
    model: Conditional, hints: Hints, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """N = count texts [N, T] of the mixture, and log of its density over that of p [N] float64.

    The plain draws come first. ValueError where the hints do not fit into a text.
    """
    pieces = find_pieces(hints, model.length)
    log_v = weigh(model, pieces, len(hints), generator) if pieces else torch.zeros(0)
    placements = Placements(pieces, log_v, len(hints), model.length)
    if not placements.log_c[-1, -1] > -torch.inf:  # nor where no hint of a factor fits
        raise ValueError(f"{model.length} tokens have no room for the hints; give shorter ones")
    plain = max(1, round(PLAIN * count))
    uniform = uniforms(count, model.length, generator)
    tokens = torch.full_like(uniform, DRAWN, dtype=torch.long)  # [N, T]
    tokens[plain:] = placements.draw(count - plain, generator)
    drawn = walk(model, None, uniform, tokens)
    log_plain, log_forced = (uniform.new_tensor([plain, count - plain]) / count).log()
    log_ratio = placements.log_ratio(drawn.tokens, drawn.log_p, model.end)
    return drawn.tokens, log_plain.logaddexp(log_forced + log_ratio)
