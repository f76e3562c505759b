"""Our learner: lines 1 and 3 of Algorithm 1 draw from q, weigh the draws, and fit q to them.

    draw    s ~ q, independent sequences without resampling; they join the pool of all draws
    weigh   w(s) = p^(0)(s) phi(s) / q(s),   W_i = min(w_i, c) / sum_j min(w_j, c)
    fit     q <- argmin_q sum_i W_i [-log q(s_i)]                       the weighted eq. 7

    line 1          a ladder of such steps from q = p^(0), each fitted to p^(0) phi^lambda with
                    the largest lambda <= 1 at which enough draws count, and the last to sigma
    line 3          one step from q^(m-1)
    line 4          nothing: p^(m) = q^(m) has learned what a twist could add, so psi^(m) = 1

A pair is (q^(m), 1), and weighs as in eq. 8. q is p^(0) with an adapter of the final states h:

    logits of q = head(h + U) + a g,   (U, a) = MLP(h)                                  [.., V]

The output layer is not trained, so what is learned about one token serves those with similar output
embeddings as well. g are scores of the tokens by a surrogate of phi. Under w the pool is a sample
of sigma, whichever proposals drew it: none depends on its own draws, so E[w_i] = Z_sigma. While
proposals are poor, a few texts have all the weight; c, which truncates it (Ionides, 2008), is the
largest number under which the ESS of W is large enough. A fit that goes on for long learns the
heavy texts by heart: so each generation fits an adapter anew, a share of the texts is held out, and
the q with their least loss is kept. The objective is that of distributional policy gradients
(Parshakova et al., 2019), the ladder that of adaptive SMC samplers (Jasra et al., 2011). N
sequences in the pool, M texts of a fit, U updates, n rows of a batch, T tokens, D width, S tokens
or prefixes that differ, V vocabulary.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from beyond.forced import Forced, draw_texts, pieces_of
from distill.finetune import Best
from distill.pair import Pair
from distill.paper import CHECKED, Paper
from eval.options import Options, option
from tinystories.decoder import Conditional, padded, row_slices
from tinystories.gpt_neo import GPTNeo, at_least_float32
from tsmc.draws import effective_sample_size, normalise, uniforms
from tsmc.streams import joined, progress
from twist.mlp import TwistMLP

POWERS = [2 ** (-n / 8) for n in range(112)]  # among which lambda is searched
SPREAD = 10**0.5  # standard deviation of d and of e w under the prior that the penalty is
TILTS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)  # factors of the scores g that are tried
PATIENCE = 4  # checks without a lower loss, after which a fit ends
LEAST_HELD, MOST_HELD = 20, 256  # texts held out; the loss of fewer says nothing
GROUP = 256  # prefixes whose logits are in memory at a time; fewer are padded


@dataclass(frozen=True)
class PooledOptions(Options):
    surrogate: bool = option(True, "let the adapter see a score of phi for each token")
    pool_first_draws: int = option(7000, "sequences drawn for psi^(0)", low=1)
    pool_first_rounds: int = option(8, "steps of the ladder that they are drawn in", low=1)
    pool_first_ess: float = option(0.1, "least ESS of a step, a share of texts that pass", high=1)
    pool_first_updates: int = option(30, "gradient steps of a step of the ladder", low=1)
    pool_draws: int = option(9000, "sequences drawn from q in each further generation", low=1)
    pool_least_ess: float = option(0.05, "truncate weights to an ESS of this share of all", high=1)
    pool_updates: int = option(120, "gradient steps of each generation, at most", low=1)
    pool_held_out: float = option(0.1, "share of texts that only say when to stop", high=0.9)
    pool_batch_size: int = option(64, "sequences of one step", low=1)
    pool_learning_rate: float = option(1e-4, "Adam's step size, times 192 / D", high=1)


class Adapted(Conditional):
    """The language model q, p^(0) = base at first; its `network` is the adapter, the MLP with g."""

    def __init__(self, base: Conditional, scores: Tensor | None, generator: Generator):
        super().__init__(base.prompt, base.length, base.width, base.vocab_size, base.end)
        self.base = base
        self.network = TwistMLP(base.width, base.width + (scores is not None), generator)
        self.network.register_buffer("scores", scores)

    @classmethod
    def load(cls, base: Conditional, tensors: dict[str, Tensor]) -> Self:
        """q over p^(0) = base by the tensors of its adapter."""
        q = cls(base, tensors.get("scores"), Generator(base.prompt.device))
        q.network.load_state_dict(tensors)
        return q

    def cache(self) -> Any:
        return self.base.cache()

    def read(self, ids: Tensor, cache: Any) -> Tensor:
        return self.base.read(ids, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        moved = self.network(hidden)  # [..., D] or [..., D + 1]
        # Shift first, then one product with the embeddings, which is the expensive step.
        shifted = at_least_float32(hidden) + moved[..., : self.width]
        logits = self.base.logits(shifted.to(hidden.dtype))
        if self.network.scores is None:
            return logits
        return logits + moved[..., self.width :] * self.network.scores


class Texts:
    """Tokens [M, T] of a fit, with their hidden states of p^(0), which is not trained. They share
    beginnings: a step makes the V logits of q, its main cost, once for the prefixes that differ."""

    def __init__(self, base: Conditional, tokens: Tensor):
        slices = row_slices(tokens, base.width * tokens.shape[1])
        with torch.no_grad():
            hidden = torch.cat([base.hidden(tokens[rows]) for rows in slices])  # [M, T, D]
        self.tokens = tokens
        self.hidden = hidden.flatten(0, 1)  # [M T, D]
        prefixes = []  # where in the hidden states that of an equal prefix is found first
        known: dict[tuple[int, int], int] = {}  # by the prefix without its last token, and by that
        for n, row in enumerate(tokens.tolist()):
            prefix = 0  # the empty one
            for t, token in enumerate(row, 1):
                prefixes.append(prefix)
                prefix = known.setdefault((prefix, token), n * tokens.shape[1] + t)
        self.prefixes = torch.tensor(prefixes, device=tokens.device).view_as(tokens)  # [M, T]

    def losses(self, q: Adapted, rows: Tensor, weights: Tensor) -> Iterator[Tensor]:
        """-log q of texts by their rows [n], times their weights [n]: its parts by GROUP prefixes,
        each with a gradient, so that the logits of one part at a time are in memory."""
        prefixes, index = self.prefixes[rows].unique(return_inverse=True)  # [S], [n, T]
        tokens, weights = self.tokens[rows], weights[:, None].expand_as(index)  # [n, T]
        for number, some in enumerate(prefixes.split(GROUP)):
            log_q = q.head(self.hidden[padded(some, GROUP)]).log_softmax(-1)  # [GROUP, V]
            is_here = index // GROUP == number  # [n, T]
            chosen = log_q[index[is_here] % GROUP, tokens[is_here]]
            yield -(weights[is_here] * chosen).sum()

    @torch.no_grad()
    def loss(self, q: Adapted, rows: Tensor, weights: Tensor) -> float:
        """-log q of texts by their rows [n], times their weights [n]."""
        return sum(part.item() for part in self.losses(q, rows, weights))

    @torch.no_grad()
    def tilt(self, q: Adapted, rows: Tensor) -> None:
        """Let q begin at a = 1, p^(0) tilted by the scores g times that of TILTS at which texts by
        their rows [n] have the least loss, which is convex in it."""
        nn.init.ones_(q.network.last.bias[-1:])
        scores, losses, equal = q.network.scores, [], torch.ones_like(rows, dtype=torch.float32)
        for factor in TILTS:
            q.network.scores = factor * scores
            losses.append(self.loss(q, rows, equal))
        q.network.scores = TILTS[losses.index(min(losses))] * scores


@dataclass
class Pool:
    """N sequences from one proposal q, or all that have been drawn so far."""

    tokens: Tensor  # [N, T]
    log_weights: Tensor  # [N] log w, float64, because weights of all rounds are compared
    log_phi: Tensor  # [N]


def tempered(pool: Pool, least_ess: float) -> tuple[Tensor, float]:
    """log of w phi^(lambda - 1) [N] and lambda: the largest in POWERS with which their ESS reaches
    least_ess times the number of weights above zero; where none does, that of the largest ESS."""
    alive = pool.log_weights > -torch.inf
    log_phi = pool.log_phi.where(alive, 0.0)  # -inf times 1 - lambda = 0 would be NaN
    candidates = [pool.log_weights - (1 - power) * log_phi for power in POWERS]
    ess = [effective_sample_size(one).item() for one in candidates]
    # Of texts with phi > 0: under a hard phi the others never count, whatever lambda is.
    enough = min(least_ess * alive.sum().item(), max(ess))
    chosen = next(i for i in range(len(ess)) if ess[i] >= enough)
    return candidates[chosen], POWERS[chosen]


def truncated(log_weights: Tensor, least_ess: float) -> Tensor:
    """W [N] of log w [N] for the largest c with which their ESS is at least least_ess * N; where
    fewer sequences have a weight, these have equal ones. ValueError where none has."""
    alive = log_weights[log_weights > -torch.inf]
    if not len(alive):
        fault = f"none of the {len(log_weights)} texts drawn has phi > 0"
        raise ValueError(f"{fault}; draw more (--pool-first-draws), or soften the potential")
    low, high = alive.min(), alive.max()
    # Truncation biases the weights towards the proposals, so only where the ESS needs it. The ESS
    # grows as c falls, so bisection finds the largest c that is small enough.
    if effective_sample_size(log_weights) < least_ess * len(log_weights):
        for _ in range(40):
            middle = (low + high) / 2
            ess = effective_sample_size(log_weights.clamp(max=middle))
            is_enough = ess >= least_ess * len(log_weights)
            low = torch.where(is_enough, middle, low)
            high = torch.where(is_enough, high, middle)
        high = low
    return normalise(log_weights.clamp(max=high))


def fit_surrogate(base: Conditional, tokens: Tensor, log_phi: Tensor) -> Tensor:
    """The scores g [V] of a surrogate of phi, by texts [N, T] with log phi [N].

        y(s) = phi(s)^(1/c),   logit y(s) ~ b + sum of g(v) = d(v) + e(v) w over the tokens v of s
        d, w, b = argmin  sum_i cross-entropy(y_i, b + sum g) + (|d|^2 + |w|^2) / 20

    Few draws have a weight, but all have a score to learn from. c >= 1 is the least for which y has
    an ESS of half of the texts, so that labels differ. Rare tokens share w with those whose output
    embeddings e [V, D] are similar. Weights contain phi itself, so sigma stays the target.
    """
    power = tempered(Pool(tokens, log_phi, log_phi), 0.5)[1]  # 1 / c
    labels = (power * log_phi).exp().clamp(max=1.0).float()  # [N]
    # A token that occurs twice counts once: what matters is whether a text has it.
    ordered = tokens.sort(1).values  # [N, T]
    is_first = F.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0), value=True)  # of equal tokens
    used, index = ordered.unique(return_inverse=True)  # [S], [N, T]
    network: Any = getattr(base, "network", None)
    centred = torch.zeros(base.vocab_size, 1, device=labels.device)  # of a model unknown here
    if isinstance(network, GPTNeo):
        centred = network.transformer.wte.weight[: base.vocab_size].detach()
    elif hasattr(network, "get_output_embeddings"):  # of transformers
        centred = network.get_output_embeddings().weight[: base.vocab_size].detach()
    centred = at_least_float32(centred)  # [V, D]
    centred = centred - centred[used].mean(0)
    length = centred.square().sum(1).mean().sqrt()
    # With longer embeddings w would be stiffer than d, which the iterations then hardly move.
    embeddings = centred / length.clamp(min=1e-12)  # e [V, D]
    single = embeddings.new_zeros(len(used), 1).requires_grad_(True)  # d / SPREAD
    shared = embeddings.new_zeros(embeddings.shape[1], 1).requires_grad_(True)  # w / SPREAD
    # From the base rate, L-BFGS needs no steps to find that nearly all labels are zero.
    intercept = labels.mean().clamp(1e-6, 1 - 1e-6).logit().clone().requires_grad_(True)  # b
    settings = {"max_iter": 60, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS([single, shared, intercept], **settings)

    def loss() -> Tensor:  # L-BFGS asks for it several times in a step
        optimizer.zero_grad()
        scores = SPREAD * (single + embeddings[used] @ shared)  # [S, 1]
        sums = (F.embedding(index, scores).squeeze(2) * is_first).sum(1)  # [N]
        entropy = F.binary_cross_entropy_with_logits(sums + intercept, labels, reduction="sum")
        total = (single.square().sum() + shared.square().sum()) / 2 + entropy
        total.backward()
        return total.detach()

    optimizer.step(loss)
    with torch.no_grad():
        return (SPREAD * (embeddings @ shared).index_add(0, used, single)).squeeze(1)


def hold_out(tokens: Tensor, weights: Tensor, share: float, source: Generator) -> list[Tensor]:
    """Which of texts [N, T] a fit does not learn from [N], a random share of those that differ and
    have a weight [N], or none of too few; and the heaviest of them [M, T] with weights [M]."""
    texts, number = tokens.unique(dim=0, return_inverse=True)  # [S, T], [N]
    weight = weights.new_zeros(len(texts)).index_add(0, number, weights)  # [S], copies together
    chance = torch.rand(len(texts), device=tokens.device, generator=source)  # [S]
    is_held = (chance < share) & (weight > 0)  # [S]
    is_held &= LEAST_HELD <= is_held.sum() < (weight > 0).sum()
    heavy = (weight * is_held).topk(min(MOST_HELD, int(is_held.sum()))).indices  # [M]
    return [is_held[number], texts[heavy], weight[heavy]]


class Pooled(Paper):
    """Draw, weigh and fit, with PooledOptions."""

    Options = PooledOptions
    defaults = {"resampling": "systematic"}  # noqa: RUF012
    pool: Any = None  # a Pool of all draws so far

    def draw(self, q: Conditional | Forced, word: str, m: int, count: int) -> None:
        """`count` sequences of q join the pool with their weights."""

        def weighed(size: int, generator: Generator) -> Pool:
            if isinstance(q, Forced):
                tokens, log_ratio = q.draw(size, generator)  # [n, T], [n] log q / p^(0)
            else:
                uniform = uniforms(q.length, size, generator).T  # [n, T]
                tokens, log_p, log_q, _ = draw_texts(self.base, q, uniform)
                log_ratio = (log_q - log_p).sum(1)
            log_phi = self.log_phi(tokens)  # [n]
            return Pool(tokens, (log_phi - log_ratio).double(), log_phi)

        drawn = self.streams.draw(word, m, count, weighed)
        self.pool = joined([self.pool, drawn], self.streams.device) if self.pool else drawn

    def learn_twist(self, model: Conditional, m: int) -> Pair:
        """Line 1: psi^(0) = q^(0) / p^(0), kept as q^(0), the last step of the ladder; line 4."""
        if m > 0:
            return Pair(model, None)
        options = self.options
        pieces = pieces_of(self.log_phi, options.lm)
        forced = Forced(self.base, pieces, self.streams.stream("hints")) if pieces else None
        q = model  # p^(0) proposes
        total = options.pool_first_draws
        at_once = math.ceil(total / options.pool_first_rounds)
        for step, start in enumerate(range(0, total, at_once), 1):
            count = min(at_once, total - start)
            is_last = start + count == total
            word = "sampling" if is_last else f"ladder {step} sampling"
            # Half of the draws of a potential that names words hold them, at positions by chance.
            num_forced = count // 2 if forced else 0
            self.draw(q, word, 0, count - num_forced)
            if num_forced > 0:
                self.draw(forced, f"{word}, forced", 0, num_forced)
            if not is_last:
                log_weights, _ = tempered(self.pool, options.pool_first_ess)
                q = self.fit(f"ladder {step}", 0, log_weights, q)
        return Pair(self.fit("distillation", 0, self.pool.log_weights), None)

    def distil(self, pair: Pair, m: int) -> Conditional:
        """Line 3: p^(m) = q^(m), fitted to all draws so far, to which q^(m-1) adds."""
        self.draw(pair.model, "sampling", m, self.options.pool_draws)
        return self.fit("distillation", m, self.pool.log_weights)

    def fit(self, word: str, m: int, log_weights: Tensor, start: Any = None) -> Adapted:
        """The weighted eq. 7: q fitted to the pool by log weights [N], from `start`, the last rung
        of the ladder, or else from p^(0) tilted by the surrogate, with texts held out."""
        options, base, pool = self.options, self.base, self.pool
        generator, chance = (self.streams.stream(one, m) for one in (word, f"{word}, held out"))
        weights = truncated(log_weights, options.pool_least_ess)  # [N]
        share = 0.0 if start else options.pool_held_out
        is_held, held_tokens, held_weights = hold_out(pool.tokens, weights, share, chance)
        scores = None  # g [V] of the surrogate, which does not see phi of the texts held out either
        if options.surrogate:
            scores = fit_surrogate(base, pool.tokens[~is_held], pool.log_phi[~is_held])
        q = Adapted(base, scores, generator)
        if isinstance(start, Adapted):  # the new scores stay
            q.network.load_state_dict(dict(start.network.named_parameters()), strict=False)
        updates = options.pool_first_updates if start else options.pool_updates  # U
        size = (updates, options.pool_batch_size)
        learned = weights.masked_fill(is_held, 0.0)  # [N]
        batches = torch.multinomial(learned, math.prod(size), True, generator=generator).view(size)
        # Most texts have hardly any weight; those that no batch draws need no states.
        distinct, batches = batches.unique(return_inverse=True)
        texts = Texts(base, pool.tokens[distinct])
        if options.surrogate and not start:
            texts.tilt(q, batches[0])
        held = Texts(base, held_tokens) if len(held_tokens) else None
        all_held = torch.arange(len(held_tokens), device=held_tokens.device)
        # U moves a logit by a sum over D, so the step falls with D.
        rate = options.pool_learning_rate * 192 / base.width
        parameters = list(q.network.parameters())
        optimizer = torch.optim.Adam(parameters, lr=rate, fused=True)
        best = Best(q.network, PATIENCE)
        equal = weights.new_full(size[1:], 1 / (size[1] * base.length))  # [n]
        for update, rows in enumerate(progress(batches, word, m), 1):  # [n]
            optimizer.zero_grad()
            total = 0.0
            for loss in texts.losses(q, rows, equal):
                loss.backward(inputs=parameters)  # p^(0) is not trained
                total = total + loss.detach()
            self.note(fit_loss=total)
            optimizer.step()
            is_checked = update % CHECKED == 0 or update == updates
            if held and is_checked and best.is_over(held.loss(q, all_held, held_weights)):
                break
        if held:
            best.restore()
        return q

    def scored(self, m: int) -> int:
        return self.options.pool_first_draws + m * self.options.pool_draws

    def state(self) -> dict[str, Tensor]:
        return vars(self.pool)

    def resume(self, state: dict[str, Tensor]) -> None:
        self.pool = Pool(**state)
