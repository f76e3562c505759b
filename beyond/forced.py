"""Forced draws: texts of p that hold a word at a position by chance, with their density.

    python -m beyond.forced --potential keyword:dragon --samples 3

A piece b_i is a spelling, in tokens, of a word that texts with phi > 0 are likely to hold, a hint
of the potential. p draws a text token by token. Before each token u, as long as no piece has been
written, a piece is, with the chances h_iu, and the text goes on behind it:

    rho_iu = p(first token of b_i | s_{1:u}) kappa_i,   h_iu = rho_iu / (sum_j rho_ju + R_u)

where kappa_i is what the other tokens of the piece usually have, and R_u the mean over texts of p
of all rho behind u. So words come where p would write them. Whatever kappa and R are, s comes from
every position at which it holds a piece, and from none:

    q(s) / p(s) = sum over (i, u) at which s holds b_i of prod_{v < u} (1 - h_v) h_iu / p(b_i)
                  + prod_v (1 - h_v),                                    h_v = sum_i h_iv

Of N draws n are plain draws of p, which bound the weights. All weights divide by the density of the
mixture, as in `tsmc/mixture.py`, so E[1/N sum w u] = sum_s p(s) phi(s) u(s) for all u:

    w(s) = p(s) phi(s) / (n/N p(s) + (1 - n/N) q(s)) <= phi(s) N/n

N texts, n rows, T tokens, I pieces, L tokens of a piece, S shared states, V vocabulary.
"""

import math
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from eval.job import command
from eval.options import Options, build
from eval.sample import Weighted, parsed, parser_of, report
from eval.world import World, load_sampling_world
from tinystories.decoder import Conditional, Decoder, row_slices
from tinystories.load import checkpoint_directory, load_tokenizer
from tsmc import draws
from tsmc.streams import Streams
from twist.potential import LETTER

FREE = -1  # in place of a token that is not prescribed
PLAIN = 0.5  # share of plain draws: so no word is drawn much worse than by p
PILOT, FEW = 200, 50  # texts of p by which R and kappa are chosen


@torch.no_grad()
def draw_texts(
    base: Conditional, q: Conditional, uniform: Tensor, forced: Any = None, chance: Any = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """N texts of q at uniform numbers [N, T]: tokens, log p^(0), log q of each token, [N, T], and
    log p^(0) of the first token of each piece [N, T, I]. q has the states of p^(0) = base. With
    `forced`, pieces are written at uniform numbers `chance` [N, T], infinite for plain draws."""
    tokens = torch.full(uniform.shape, FREE, device=uniform.device)  # those that are due
    log_p, log_q = torch.empty_like(uniform), torch.empty_like(uniform)
    pieces = forced.pieces if forced else []
    first = uniform.new_empty(*uniform.shape, len(pieces))
    is_begun = torch.zeros(len(uniform), dtype=torch.bool, device=uniform.device)
    decoder = Decoder(base, len(uniform))
    for t in range(base.length):
        if t > 0:
            decoder.append(tokens[:, t - 1])
        for hidden, rows, share in decoder.slices():  # [S, D], [n], [n]
            logits = q.head(hidden)  # [S, V]
            drawn, log_normaliser = draws.draw_categorical(logits, uniform[rows, t, None], share)
            if forced:
                logits_first = logits[:, forced.first][share]  # [n, I]
                first[rows, t] = (logits_first - log_normaliser[:, None]).to(first)
                below = forced.chances(first[rows, t], t).cumsum(-1)  # [n, I]
                number = (chance[rows, t, None] >= below).sum(1)  # [n] of a piece, I where none
                number = number.masked_fill(is_begun[rows], len(pieces))
                for i, piece in enumerate(pieces):
                    tokens[rows[number == i], t : t + len(piece)] = piece[: base.length - t]
                is_begun[rows] |= number < len(pieces)
            chosen = torch.where(tokens[rows, t] == FREE, drawn, tokens[rows, t])  # [n]
            tokens[rows, t] = chosen
            log_q[rows, t] = (logits[share, chosen] - log_normaliser).to(log_q)
            if q is not base:
                log_p[rows, t] = base.head(hidden).log_softmax(-1)[share, chosen].to(log_p)
    return tokens, log_q if q is base else log_p, log_q, first


def pieces_of(potential: Any, lm: str) -> list[list[int]]:
    """The spellings, by the tokenizer of a checkpoint, of the hints of the first factor that has
    some: each word as given, in small letters and capitalised, behind a space if it has letters."""
    factors = [one for one in getattr(potential, "factors", []) if getattr(one, "hints", [])]
    if not factors:
        return []
    tokenizer = load_tokenizer(checkpoint_directory(lm))
    start = len(tokenizer.encode("a", add_special_tokens=False).ids)
    pieces = []
    for word in factors[0].hints:
        for form in dict.fromkeys((word, word.lower(), word.capitalize())):
            text = f"a {form}" if re.match(LETTER, form) else f"a{form}"
            pieces.append(tokenizer.encode(text, add_special_tokens=False).ids[start:])
    return pieces


class Forced:
    """The mixture of plain draws of p = base and of draws that hold a piece."""

    @torch.no_grad()
    def __init__(self, base: Conditional, pieces: list[list[int]], generator: Generator):
        """ValueError where none of I pieces fits into a text, or where there are none."""
        self.base = base
        device = generator.device
        # Behind an end nothing can be written.
        cut = [next((b[: n + 1] for n, v in enumerate(b) if v in base.end), b) for b in pieces]
        self.pieces = [torch.tensor(b, device=device) for b in cut if len(b) <= base.length]
        if not self.pieces:
            raise ValueError("no hint of the potential fits into a text; give keyword:WORD")
        self.first = torch.stack([piece[0] for piece in self.pieces])  # [I]
        last = torch.tensor([base.length - len(piece) for piece in self.pieces], device=device)
        self.fits = torch.arange(base.length, device=device)[:, None] <= last  # [T, I]
        self.later = torch.ones(base.length, dtype=torch.float64, device=device)  # [T] R
        self.log_kappa = torch.zeros(len(self.pieces), dtype=torch.float64, device=device)  # [I]
        uniform = draws.uniforms(PILOT, base.length, generator)  # [n, T]
        never = torch.full_like(uniform, torch.inf)
        tokens, _, _, first = draw_texts(base, base, uniform, self, never)
        for i, piece in enumerate(self.pieces):  # which is written somewhere into each text
            start = torch.arange(FEW, device=device) % (last[i] + 1)  # [n]
            places = start[:, None] + torch.arange(len(piece), device=device)  # [n, L]
            log_b = base.log_probs(tokens[:FEW].scatter(1, places, piece.expand_as(places)))
            rest = log_b.gather(1, places)[:, 1:].sum(1).double()  # [n] -inf behind an end
            self.log_kappa[i] = rest[rest > -torch.inf].mean().nan_to_num(0.0)
        rho = ((first + self.log_kappa).exp() * self.fits).sum(-1).mean(0)  # [T]
        self.later = rho.sum() - rho.cumsum(0)

    def chances(self, first: Tensor, t: Any = slice(None)) -> Tensor:
        """h [..., I] at t, from log p of the first token of each piece there; also for all t."""
        rho = (first + self.log_kappa).exp() * self.fits[t]  # [..., I]
        total = rho.sum(-1, keepdim=True) + self.later[t][..., None].clamp(min=0.0)
        return rho / total.clamp(min=1e-300)

    def draw(self, count: int, generator: Generator, share: float = PLAIN) -> tuple[Tensor, Tensor]:
        """N = count texts [N, T], a share of them of p, and log of the density of the mixture over
        that of p [N]."""
        plain = max(round(share * count), int(share > 0))
        uniform = draws.uniforms(count, self.base.length, generator)  # [N, T]
        chance = draws.uniforms(count, self.base.length, generator)  # [N, T]
        chance[:plain] = torch.inf
        tokens, log_p, _, first = draw_texts(self.base, self.base, uniform, self, chance)
        log_plain, log_forced = (uniform.new_tensor([plain, count - plain]) / count).log()
        return tokens, log_plain.logaddexp(log_forced + self.log_ratio(tokens, log_p, first))

    @torch.no_grad()
    def log_over_p(self, tokens: Tensor) -> Tensor:
        """log q(s) / p(s) [N] of any texts [N, T]."""
        parts = []
        for rows in row_slices(tokens, self.base.vocab_size * self.base.length):
            some = tokens[rows]  # [n, T]
            log_p = self.base.head(self.base.hidden(some)).log_softmax(-1)  # [n, T, V]
            chosen = log_p.gather(2, some[..., None]).squeeze(2)  # [n, T]
            parts.append(self.log_ratio(some, chosen, log_p[..., self.first]))
        return torch.cat(parts)

    def log_ratio(self, tokens: Tensor, log_p: Tensor, first: Tensor) -> Tensor:
        """log q(s) / p(s) [N] of texts [N, T] with log p of their tokens [N, T], and of the first
        token of each piece [N, T, I]; infinite for a text that p cannot write."""
        h = self.chances(first)  # [N, T, I]
        log_stay = (1 - h.sum(-1)).clamp(min=0.0).log()  # [N, T]
        log_before = F.pad(log_stay.cumsum(1)[:, :-1], (1, 0))  # [N, T] until then no piece
        terms = [log_stay.sum(1, keepdim=True)]
        for i, piece in enumerate(self.pieces):
            holds = (tokens.unfold(1, len(piece), 1) == piece).all(-1)  # [N, T - L + 1]
            log_b = log_p.unfold(1, len(piece), 1).sum(-1)
            log_h = h[:, : holds.shape[1], i].log()
            term = log_before[:, : holds.shape[1]] + log_h - log_b
            terms.append(term.where(holds & (log_h > -torch.inf), -torch.inf))
        return torch.cat(terms, 1).logsumexp(1)


def draw_weighted(world: World, forced: Forced, count: int, generator: Generator) -> Any:
    """N = count forced draws, tokens [N, T], with their log_weights [N], log p phi / q."""
    tokens, log_ratio = forced.draw(count, generator)
    return SimpleNamespace(tokens=tokens, log_weights=world.potential(tokens) - log_ratio)


def main(arguments: list[str] | None = None) -> None:
    """Command line to samples; bad input ends with one line and exit code 2."""
    with command("beyond.forced"):
        typed, particles, runs, count = parsed(parser_of(__doc__), arguments)
        size = particles * runs  # N
        options = build(Options, typed)
        world = load_sampling_world(options)
        streams = Streams(options.seed, world.base.prompt.device)
        pieces = pieces_of(world.potential, options.lm)
        forced = Forced(world.base, pieces, streams.stream("hints"))
        drawn = streams.draw("forced draws", None, size, partial(draw_weighted, world, forced))
        tokens, log_weights = drawn.tokens, drawn.log_weights[None]  # [N, T], [1, N] of one run
        if not log_weights.max() > -torch.inf:
            raise ValueError("all forced draws have weight zero; draw more, or soften phi")
        texts = world.potential.texts(tokens)
        log_z = draws.log_mean_exp(log_weights)  # [1]
        drawn = Weighted(texts, world.score(tokens, texts), log_weights, log_z, True)
        if set(drawn.scores["log_phi"].tolist()) <= {0.0, -torch.inf}:  # texts pass, or do not
            evidence = drawn.evidence()
            limits = (evidence.value, min(0.0, evidence.value + evidence.above()))
            one, low = (f"{math.exp(-limit):,.0f}" for limit in limits)
            high = f"{math.exp(evidence.half_width() - evidence.value):,.0f}"
            print(f"1 in {one} texts passes the test (95 %: {low} to {high})")
        print(report(drawn, count, options.seed))


if __name__ == "__main__":
    main()
