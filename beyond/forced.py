"""Forced draws: texts of p that hold a given word at a place by chance, with their density.

    python -m beyond.forced --potential keyword:dragon --samples 3

A piece i is a string b_i of L_i tokens, a spelling of a hint: a word that texts with phi > 0 are
likely to hold. A draw has one piece at one position, (i, u) in proportion to v_i, and p draws the
other tokens. So the same text can come from every position u at which it holds a piece:

    q(s) / p(s) = sum over i and u where s holds b_i of v_i / prod p(b_i)  /  sum over all i, u of v_i

where p(b_i) are the probabilities of the tokens of b_i in s. Behind the end of a text nothing is
written: there every s agrees with a piece, and p = 1. v is four fifths what p writes, the geometric
mean of prod p(b_i) over a few texts, and one fifth the same for all pieces.

Of N draws n are plain draws of p, which bound the weights and find texts without the pieces. All
weights divide by the density of the mixture, so E[1/N sum w u] = sum_s p(s) phi(s) u(s) for all u:

    w(s) = p(s) phi(s) / (n/N p(s) + (1 - n/N) q(s)) <= phi(s) N/n

N texts, T tokens, I pieces, C contexts, D width, S shared states, R runs of K particles.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from beyond.tail import pareto_k
from eval.job import command
from eval.options import Options, build
from eval.sample import Weighted, parser_of, report, weigh
from eval.world import load_sampling_world
from tinystories.decoder import Conditional
from tinystories.load import checkpoint_directory, read_tokenizer
from tsmc.draws import (
    SCHEMES,
    Scheme,
    draw_categorical,
    effective_sample_size,
    invert,
    log_mean_exp,
    normalise,
    uniforms,
)
from tsmc.sampler import Population
from tsmc.streams import Streams

FREE = -1  # in place of a token that is not prescribed
PLAIN = 0.1  # share of plain draws
EVEN = 0.2  # share of v that is the same for all pieces
CONTEXTS = 8  # texts in which p says how likely a piece is
MOST_TEXTS = 512  # of all pieces together, so that many hints do not take long


@torch.no_grad()
def draw_texts(
    base: Conditional, q: Conditional, uniform: Tensor, prescribed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """N texts of q at uniform numbers [N, T], with log p^(0) and log q of their tokens, all [N, T].

    q has the hidden states of p^(0) = base, so that one pass serves both. A token is that of
    `prescribed` [N, T] where this is not FREE, unless the text has ended before.
    """
    if prescribed is None:
        prescribed = torch.full_like(uniform, FREE, dtype=torch.long)
    tokens = torch.empty_like(prescribed)
    log_p, log_q = torch.empty_like(uniform), torch.empty_like(uniform)
    decoder = base.decoder(len(uniform))
    for t in range(base.length):
        if t > 0:
            decoder.append(tokens[:, t - 1])
        for hidden, rows, share in decoder.slices():  # [S, D], [n], [n]
            logits = q.head(hidden)  # [S, V]
            drawn, log_normaliser = draw_categorical(logits, uniform[rows, t, None], share)
            is_free = prescribed[rows, t] == FREE  # [n]
            if base.end:
                is_free |= hidden[share, -1] > 0  # the text has ended, and only repeats its end
            chosen = drawn.where(is_free, prescribed[rows, t])  # [n]
            tokens[rows, t] = chosen
            log_q[rows, t] = (logits[share, chosen] - log_normaliser).to(log_q)
            if q is not base:
                log_p[rows, t] = base.head(hidden).log_softmax(-1)[share, chosen].to(log_p)
    return tokens, log_q if q is base else log_p, log_q


def pieces_of(potential: Any, options: Options) -> list[list[int]]:
    """The pieces of the first factor that has hints; none where no factor has any.

    A hint is spelled as given, in small letters and capitalised, behind a space.
    """
    factors = getattr(potential, "factors", [])
    words = next((one.hints for one in factors if getattr(one, "hints", [])), [])
    if not words:
        return []
    tokenizer = read_tokenizer(checkpoint_directory(options.lm))
    start = len(tokenizer.encode("a", add_special_tokens=False).ids)
    pieces = []
    for word in words:
        for form in (word, word.lower(), word.capitalize()):
            piece = tokenizer.encode(f"a {form}", add_special_tokens=False).ids[start:]
            if piece not in pieces:
                pieces.append(piece)
    return pieces


class Forced:
    """The mixture of plain draws of p = base and of draws with a piece."""

    def __init__(self, base: Conditional, pieces: list[list[int]], generator: Generator):
        """`pieces` are I lists of tokens; ValueError where none fits into a text."""
        self.base = base
        device = generator.device
        self.pieces = [torch.tensor(b, device=device) for b in pieces if len(b) <= base.length]
        if not self.pieces:
            raise ValueError(f"{base.length} tokens have no room for the hints; give shorter ones")
        contexts = max(1, min(CONTEXTS, MOST_TEXTS // len(self.pieces)))  # C
        every = torch.arange(len(self.pieces), device=device).repeat_interleave(contexts)  # [I C]
        prescribed = self.prescribe(every, generator)  # [I C, T]
        uniform = uniforms(*prescribed.shape, generator)
        _, log_p, _ = draw_texts(base, base, uniform, prescribed)
        log_p = log_p.where(prescribed != FREE, 0.0).sum(1)  # [I C]
        likely = log_p.view(-1, contexts).mean(1).clamp(min=-1e9).softmax(0)  # [I]
        self.v = (1 - EVEN) * likely + EVEN / len(likely)  # [I]
        positions = [base.length - len(b) + 1 for b in self.pieces]
        self.total_v = self.v * self.v.new_tensor(positions)  # [I] over all positions

    def prescribe(self, chosen: Tensor, generator: Generator) -> Tensor:
        """Tokens [N, T] with pieces chosen [N] at positions by chance, and FREE elsewhere; a piece
        -1 is none."""
        length = self.base.length
        prescribed = torch.full((len(chosen), length), FREE, device=chosen.device)
        uniform = uniforms(len(chosen), 1, generator)
        for i, b in enumerate(self.pieces):
            rows = (chosen == i).nonzero()  # [n, 1]
            start = (uniform[rows[:, 0]] * (length - len(b) + 1)).long()  # [n, 1]
            prescribed[rows, start + torch.arange(len(b), device=start.device)] = b
        return prescribed

    def log_ratio(self, tokens: Tensor, log_p: Tensor) -> Tensor:
        """log q(s) / p(s) [N] of texts [N, T] with log p(s_t | s_{0:t-1}) [N, T]; infinite for a
        text that p cannot write."""
        is_end = self.base.is_end(tokens)  # [N, T]
        is_behind = is_end.cumsum(1) > is_end.long()  # [N, T] whether an end comes before
        terms = []  # of each piece [N, T - L + 1]
        for b, v in zip(self.pieces, self.v, strict=True):
            is_met = tokens.unfold(1, len(b), 1) == b  # [N, T - L + 1, L]
            agrees = (is_met | is_behind.unfold(1, len(b), 1)).all(2)
            term = v.log() - log_p.unfold(1, len(b), 1).sum(2)
            terms.append(term.where(agrees, -torch.inf))
        return torch.cat(terms, 1).logsumexp(1) - self.total_v.sum().log()

    def draw(self, count: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """N = count texts [N, T], the plain draws first, and log of the mixture's density over p
        [N]."""
        plain = max(1, round(PLAIN * count))
        chosen = invert(self.total_v[None], uniforms(1, count - plain, generator))[0]  # [N - n]
        chosen = torch.cat([chosen.new_full((plain,), -1), chosen])  # [N]
        prescribed = self.prescribe(chosen, generator)
        uniform = uniforms(*prescribed.shape, generator)
        tokens, log_p, _ = draw_texts(self.base, self.base, uniform, prescribed)
        log_plain, log_forced = (uniform.new_tensor([plain, count - plain]) / count).log()
        return tokens, log_plain.logaddexp(log_forced + self.log_ratio(tokens, log_p))


def draw_runs(
    forced: Forced,
    log_phi: Callable[[Tensor], Tensor],
    particles: int,
    resample: Scheme,
    runs: int,
    generator: Generator,
) -> Population:
    """R = runs runs of K = particles forced draws, which resample at T."""
    tokens, log_ratio = forced.draw(runs * particles, generator)  # [R K, T], [R K]
    log_weights = log_phi(tokens) - log_ratio
    # The plain draws come first; in any order each run has its share of them.
    order = torch.randperm(len(tokens), generator=generator, device=tokens.device)
    tokens = tokens[order].unflatten(0, (runs, particles))  # [R, K, T]
    log_weights = log_weights[order].view(runs, particles)
    ancestors = resample(normalise(log_weights), generator)  # [R, K]
    samples = tokens[torch.arange(runs, device=tokens.device)[:, None], ancestors]
    numbers = (log_mean_exp(log_weights), effective_sample_size(log_weights))  # [R], [R]
    return Population(tokens, log_weights, ancestors, samples, *numbers)


def tail_line(drawn: Weighted) -> str:
    """Pareto k of the weights, and what a heavy tail means for estimates."""
    k = pareto_k(drawn.shares.log())
    # Where most texts count alike, a few weights that differ say nothing of a tail.
    if drawn.ess > drawn.shares.numel() / 2 or not k > 0.7:  # nor where k is NaN
        return f"Pareto k {k:.2f}"
    return f"Pareto k {k:.2f}: estimates may be further off than their errors say; draw more"


def main(arguments: list[str] | None = None) -> None:
    """Command line to samples; bad input ends with one line and exit code 2."""
    with command("beyond.forced"):
        typed = vars(parser_of(__doc__).parse_args(arguments))
        particles, runs, count = (typed.pop(name) for name in ("particles", "runs", "samples"))
        options = build(Options, {"resampling": "systematic"} | typed)
        world = load_sampling_world(options)
        pieces = pieces_of(world.potential, options)
        if not pieces:
            raise ValueError("the potential has no hints; give keyword:WORD, or use eval.sample")
        streams = Streams(options.seed, world.base.prompt.device)
        forced = Forced(world.base, pieces, streams.stream("hints"))
        settings = (forced, world.potential, particles, SCHEMES[options.resampling])
        draw = partial(draw_runs, *settings)
        population = streams.draw("forced draws", None, runs, draw, particles)
        if not (population.log_z > -torch.inf).any():
            raise ValueError(
                "all forced draws have weight zero; draw more, or soften the potential"
            )
        drawn = weigh(world, population, is_independent=True)
        print(f"forced draws propose, {runs} runs of K = {particles}")
        print(report(drawn, count, options.seed), tail_line(drawn), sep="\n")


if __name__ == "__main__":
    main()
