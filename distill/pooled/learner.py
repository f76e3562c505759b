"""Our learner: lines 1 and 3 of Algorithm 1 draw from q, weigh the draws, and fit q to them.

    draw    s ~ q, independent sequences without resampling; they join the pool of all draws
    weigh   w(s) = p^(0)(s) phi(s) / q(s)                               truncated, `pool.py`
    fit     q <- argmin_q sum_i W_i [-log q(s_i)], an adapter of p^(0)  the weighted eq. 7

Weighted likelihood is the objective of distributional policy gradients (Parshakova et al., 2019;
Khalifa et al., 2021, who call it GDC), here with adaptive importance sampling: the proposal is
refitted, and what it has drawn before is kept, with the weights that it got then. For exact weights
the minimum is q = sigma, of all q that an adapter can be.

    line 1          a ladder of such steps from q = p^(0), each fitted to p^(0) phi^b with the
                    largest b <= 1 at which enough draws count, and the last one to sigma itself
    line 3          one step from q^(m-1)
    line 4          nothing: p^(m) = q^(m) has learned what a twist could add, so psi^(m) = 1

psi^(0)(s_{1:t}) is q^(0)_t(s_t) / p^(0)(s_t | s_{0:t-1}), and for m >= 1 psi^(m) is 1; the pair
(p^(0), psi^(0)) is kept as (q^(0), 1), which is the same by eq. 8. The ladder tempers by ESS, as
adaptive SMC samplers do (Jasra et al. 2011; Del Moral et al. 2012). Each fit may use the scores g
of the surrogate (`surrogate.py`), a logistic regression of phi on all draws: few draws have a
weight, but all have a score. N sequences in the pool, U updates, n rows of a batch, T tokens, D
width, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distill.finetune import draw_batches
from distill.learner import Learner
from distill.options import option
from distill.pair import Pair
from distill.pooled.adapter import Adapted, Adapter
from distill.pooled.held_out import GROUP, HeldOut, Texts
from distill.pooled.pool import Round, draw_round, joined, tempered, truncated
from distill.pooled.surrogate import fit_surrogate
from tinystories.decoder import Conditional
from tsmc.processes import progress
from twist.ctl import EXPLODED

WIDTH = 192  # D of the states that --pool-learning-rate is said for


@dataclass(frozen=True)
class PooledOptions:
    surrogate: bool = option(True, "let the adapter see a score of phi for each token")
    pool_first_draws: int = option(7000, "sequences drawn for psi^(0)")
    pool_first_rounds: int = option(8, "steps of the ladder that they are drawn in")
    pool_first_ess: float = option(
        0.1, "share of the texts with phi > 0 that the ESS of a step must reach", high=1
    )
    pool_first_updates: int = option(30, "gradient steps of a step of the ladder")
    pool_draws: int = option(9000, "sequences drawn from q in each further generation")
    pool_least_ess: float = option(0.05, "truncate weights to an ESS of this share of all", high=1)
    pool_updates: int = option(120, "gradient steps of each generation, at most")
    pool_held_out: float = option(
        0.1, "share of the texts that are not learned but say when to stop; 0: never", high=0.9
    )
    pool_batch_size: int = option(64, "sequences of one step")
    pool_learning_rate: float = option(
        1e-4, "Adam's step size at width D = 192; times 192 / D", high=1
    )


class Pooled(Learner):
    """Draw, weigh and fit, with PooledOptions."""

    Options = PooledOptions
    pool: Any = None  # a Round of all draws so far; None before the first

    def first_twist(self) -> Pair:
        """Line 1: psi^(0) = q^(0) / p^(0), kept as q^(0): the last step of the ladder."""
        options = self.options
        total, q = options.pool_first_draws, self.base  # p^(0) proposes
        at_once = math.ceil(total / options.pool_first_rounds)
        hints = getattr(self.log_phi, "hints", [])
        for step, start in enumerate(range(0, total, at_once), 1):
            count = min(at_once, total - start)
            is_last = start + count == total
            word = "sampling" if is_last else f"ladder {step} sampling"
            # Half of the draws of a potential that names words hold them, at places by chance.
            forced = count // 2 if hints else 0
            self.draw(q, word, 0, count - forced)
            if forced:
                self.draw(self.base, f"{word}, forced", 0, forced, hints)
            if not (self.pool.log_weights > -math.inf).any():
                fault = f"none of the {count} texts drawn first has phi > 0"
                remedy = "see whether one text can satisfy all factors, soften the potential"
                hinted = "give it hints, words that such texts hold, or raise --pool-first-draws"
                raise ValueError(f"{fault}; {remedy}, {hinted}")
            if not is_last:
                log_weights, power = tempered(self.pool, options.pool_first_ess)
                self.record("ladder", 0, power=power)
                # Targets of the ladder are alike, so a few steps from the last MLP suffice.
                updates = options.pool_first_updates
                q = self.fit(f"ladder {step}", 0, log_weights, updates, q, is_rung=True)
        return Pair(self.fit_to_sigma(0), None)

    def distil(self, pair: Pair, m: int) -> Conditional:
        """Line 3: p^(m) = q^(m), fitted to all draws so far, to which q^(m-1) adds."""
        assert self.pool, "the pool is empty; begin with first_twist(), or resume(state)"
        self.draw(pair.model, "sampling", m, self.options.pool_draws)
        return self.fit_to_sigma(m)

    def draw(self, q: Conditional, word: str, m: int, count: int, hints: Sequence = ()) -> None:
        """Draw and weigh: `count` sequences of q, or forced ones of p^(0), join the pool."""
        draw = partial(draw_round, self.base, q, self.log_phi, hints=hints)
        drawn = Round(**self.streams.draw(word, m, count, draw))
        self.pool = joined([self.pool, drawn]) if self.pool else drawn

    def fit_to_sigma(self, m: int) -> Conditional:
        """q^(m): an adapter of p^(0), learned anew from the pool."""
        # Anew, because an adapter that goes on learns the few heavy texts by heart.
        options = self.options
        given = ("distillation", m, self.pool.log_weights, options.pool_updates, self.base)
        return self.fit(*given, is_rung=False)

    def fit(
        self,
        word: str,
        m: int,
        log_weights: Tensor,
        updates: int,
        start: Any,
        is_rung: bool,
    ) -> Conditional:
        """The weighted eq. 7: q fitted to the pool by log weights [N], beginning at `start`.

        But for the rungs of the ladder, it begins at p^(0) tilted by the surrogate, and a share of
        the texts is held out: q is that at which their loss is least, and the fit ends when that
        has passed. ValueError where q has exploded.
        """
        options, base, pool = self.options, self.base, self.pool
        weights = truncated(log_weights, options.pool_least_ess)  # [N]
        generator = self.streams.stream(word, m)
        chance = self.streams.stream(f"{word}, held out", m)
        share = 0.0 if is_rung else options.pool_held_out
        held = HeldOut(base, pool.tokens, weights, share, chance)
        scores = None  # g [V] of the surrogate, which does not see phi of the texts held out either
        if options.surrogate:
            known = (pool.tokens[~held.is_held], pool.log_phi[~held.is_held])
            scores = fit_surrogate(*known, base.embeddings, base.vocab_size)
        adapter = Adapter(base, scores, generator)
        if start is not base:
            adapter.shift.load_state_dict(start.adapter.shift.state_dict())
        learned = weights.masked_fill(held.is_held, 0.0)  # [N]
        batches = draw_batches(learned, options.pool_batch_size, updates, generator)  # [U, n]
        # Most texts have hardly any weight; those that no batch draws need no states.
        distinct, places = batches.unique(return_inverse=True)
        texts = Texts(base, pool.tokens[distinct])
        if options.surrogate and not is_rung:
            texts.tilt(adapter, places[0])
        parameters = list(adapter.shift.parameters())
        # U moves a logit by a sum over D, so the step falls with D.
        rate = options.pool_learning_rate * WIDTH / base.width
        optimizer = torch.optim.Adam(parameters, lr=rate, fused=True)
        for step, rows in enumerate(progress(places, word, m), 1):  # [n]
            loss = -texts.log_q(adapter, rows).sum() / texts.is_counted[rows].sum()
            self.record(word, m, loss=loss.detach())
            optimizer.zero_grad()
            loss.backward(inputs=parameters)  # p^(0) is not trained
            optimizer.step()
            if held.is_over(adapter, step, updates):
                break
        held.best.restore()
        for loss in held.best.losses:
            self.record(f"{word}, held out", m, loss=loss)
        check_moves(adapter, texts, f"{word} of generation {m}")
        return Adapted(base, adapter.requires_grad_(False))

    def scored(self, m: int) -> int:
        return self.options.pool_first_draws + m * self.options.pool_draws

    def state(self) -> dict[str, Tensor]:
        return vars(self.pool)

    def resume(self, state: dict[str, Tensor]) -> None:
        device = self.streams.device
        self.pool = Round(**{name: tensor.to(device) for name, tensor in state.items()})


@torch.no_grad()
def check_moves(adapter: Adapter, texts: Texts, title: str) -> None:
    """ValueError where an adapter moves the logits of p^(0) by more than EXPLODED."""
    logits = adapter.base.head(texts.states[:GROUP])  # [n, V]
    moved = adapter(texts.states[:GROUP]) - logits
    largest = moved[logits.isfinite()].abs().max().item()
    if not largest < EXPLODED:
        fault = f"{title}: the adapter has exploded to {largest:.0f} nats"
        raise ValueError(f"{fault}; lower --pool-learning-rate")
