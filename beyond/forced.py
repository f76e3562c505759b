"""Forced draws: texts of p that hold a word at a position by chance, with their density.

    python -m beyond.forced --potential keyword:dragon --samples 3

A piece b_i is a spelling, in tokens, of a word that texts with phi > 0 are likely to hold, a hint
of the potential. A draw has it at position u with probability v_iu, and p draws all other tokens.
The text s can come from every position at which it holds a piece:

    log q(s) / p(s) = log sum over (i, u) at which s holds b_i of v_iu / prod p(b_i),  sum v = 1

where p(b_i) are the probabilities in s of the tokens of the piece. Behind the end of a text nothing
is written: there every s agrees with a piece, and p = 1. Of N draws n are plain draws of p, which
bound the weights and find texts without the pieces. All weights divide by the density of the
mixture, so E[1/N sum w u] = sum_s p(s) phi(s) u(s) for all u:

    w(s) = p(s) phi(s) / (n/N p(s) + (1 - n/N) q(s)) <= phi(s) N/n

N texts, n rows, T tokens, I pieces, M placements (i, u), S shared states, V vocabulary.
"""

import math
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Generator, Tensor

from beyond.tail import pareto_k
from eval.job import command
from eval.options import Options, build
from eval.sample import Weighted, parsed, parser_of, report
from eval.world import World, load_sampling_world
from tinystories.decoder import Conditional, Decoder
from tinystories.load import checkpoint_directory, load_tokenizer
from tsmc import draws
from tsmc.sampler import Population
from tsmc.streams import Streams
from twist.potential import LETTER

FREE = -1  # in place of a token that is not prescribed
PLAIN = 0.1  # share of plain draws
EVEN = 0.2  # share of v that is the same for all pieces; the others go by what p writes


@torch.no_grad()
def draw_texts(
    base: Conditional, q: Conditional, uniform: Tensor, prescribed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """N texts of q at uniform numbers [N, T]: tokens, log p^(0) and log q of each token, [N, T]. q
    has the states of p^(0) = base, so that one pass serves both. A token is the prescribed one
    [N, T] where this is not FREE, unless the text has ended before."""
    tokens = torch.empty_like(prescribed)
    log_p, log_q = torch.empty_like(uniform), torch.empty_like(uniform)
    decoder = Decoder(base, len(uniform))
    for t in range(base.length):
        if t > 0:
            decoder.append(tokens[:, t - 1])
        for hidden, rows, share in decoder.slices():  # [S, D], [n], [n]
            logits = q.head(hidden)  # [S, V]
            drawn, log_normaliser = draws.draw_categorical(logits, uniform[rows, t, None], share)
            is_free = prescribed[rows, t] == FREE  # [n]
            if base.end:
                is_free |= hidden[share, -1] > 0  # the text has ended, and only repeats its end
            chosen = drawn.where(is_free, prescribed[rows, t])  # [n]
            tokens[rows, t] = chosen
            log_q[rows, t] = (logits[share, chosen] - log_normaliser).to(log_q)
            if q is not base:
                log_p[rows, t] = base.head(hidden).log_softmax(-1)[share, chosen].to(log_p)
    return tokens, log_q if q is base else log_p, log_q


def pieces_of(potential: Any, lm: str) -> list[list[int]]:
    """The spellings, by the tokenizer of a checkpoint, of the hints of the first factor that has
    some: each word as given, in small letters and capitalised, behind a space if it has letters."""
    factors = [one for one in getattr(potential, "factors", []) if getattr(one, "hints", [])]
    pieces = []
    for word in factors[0].hints if factors else []:
        tokenizer = load_tokenizer(checkpoint_directory(lm))
        start = len(tokenizer.encode("a", add_special_tokens=False).ids)
        for form in dict.fromkeys((word, word.lower(), word.capitalize())):
            text = f"a {form}" if re.match(LETTER, form) else f"a{form}"
            pieces.append(tokenizer.encode(text, add_special_tokens=False).ids[start:])
    return pieces


class Forced:
    """The mixture of plain draws of p = base and of draws that hold a piece."""

    def __init__(self, base: Conditional, pieces: list[list[int]], generator: Generator):
        """ValueError where none of I pieces fits into a text, or where there are none."""
        self.base = base
        tables, likely = [], []
        for b in [b for b in pieces if len(b) <= base.length]:
            positions = base.length - len(b) + 1
            table = torch.full((positions, base.length), FREE, device=generator.device)
            for u in range(positions):
                table[u, u : u + len(b)] = table.new_tensor(b)
            # How likely p writes it: the geometric mean over a text for each position.
            uniform = draws.uniforms(*table.shape, generator)
            _, log_p, _ = draw_texts(base, base, uniform, table)
            likely.append(log_p.where(table != FREE, 0.0).sum(1).mean())
            tables.append(table)
        if not tables:
            raise ValueError("no hint of the potential fits into a text; give keyword:WORD")
        share = (1 - EVEN) * torch.stack(likely).clamp(min=-1e9).softmax(0) + EVEN / len(tables)
        self.table = torch.cat(tables)  # [M, T] the placements
        sizes = torch.tensor([len(table) for table in tables], device=share.device)
        self.v = (share / sizes).repeat_interleave(sizes)  # [M]

    def draw(self, count: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """N = count texts [N, T], and log of the density of the mixture over that of p [N]."""
        plain = max(1, round(PLAIN * count))
        chosen = draws.invert(self.v[None], draws.uniforms(1, count - plain, generator))[0]
        free = torch.full_like(self.table[:1], FREE).expand(plain, -1)
        prescribed = torch.cat([free, self.table[chosen]])  # [N, T]
        uniform = draws.uniforms(*prescribed.shape, generator)
        tokens, log_p, _ = draw_texts(self.base, self.base, uniform, prescribed)
        log_plain, log_forced = (uniform.new_tensor([plain, count - plain]) / count).log()
        return tokens, log_plain.logaddexp(log_forced + self.log_ratio(tokens, log_p))

    def log_ratio(self, tokens: Tensor, log_p: Tensor) -> Tensor:
        """log q(s) / p(s) [N] of texts [N, T] with log p(s_t | s_{0:t-1}) [N, T]; infinite for a
        text that p cannot write."""
        is_end = self.base.is_end(tokens)  # [N, T]
        is_behind = is_end.cumsum(1) > is_end.long()  # [N, T] whether an end comes before
        terms = []  # of each placement [N]
        for placed, v in zip(self.table, self.v, strict=True):
            agrees = ((tokens == placed) | (placed == FREE) | is_behind).all(1)
            term = v.log() - log_p[:, placed != FREE].sum(1)
            terms.append(term.where(agrees, -torch.inf))
        return torch.stack(terms, 1).logsumexp(1)


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
        log_z, ess = draws.log_mean_exp(log_weights), draws.effective_sample_size(log_weights)
        if not log_z > -torch.inf:
            raise ValueError("all forced draws have weight zero; draw more, or soften phi")
        ancestors = draws.systematic(draws.normalise(log_weights), streams.stream("resampling"))
        population = Population(tokens[None], log_weights, ancestors, tokens[ancestors], log_z, ess)
        texts = world.potential.texts(tokens)
        drawn = Weighted(texts, world.score(tokens, texts), population.shares(), population, True)
        print(report(drawn, count, options.seed))
        if set(drawn.scores["log_phi"].tolist()) <= {0.0, -torch.inf}:  # texts pass, or do not
            evidence = drawn.evidence()
            limits = (evidence.value + sign * evidence.half_width() for sign in (0, 1, -1))
            one, low, high = (f"{math.exp(-limit):,.0f}" for limit in limits)
            print(f"About 1 in {one} texts of the model passes the test (95 %: {low} to {high})")
        k = pareto_k(log_weights)
        is_heavy = drawn.ess < size / 2 and k > 0.7  # else most texts count alike
        warning = ": estimates may be further off than their errors say; draw more, or train"
        print(f"Pareto k of the weights {k:.2f}{warning if is_heavy else ''}")


if __name__ == "__main__":
    main()
