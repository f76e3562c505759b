"""The pool: every sequence drawn so far, weighted by the proposal that drew it.

    w_i = p^(0)(s_i) phi(s_i) / q_r(s_i)         round r drew s_i from q_r
    W_i = min(w_i, c) / sum_j min(w_j, c)        truncated importance sampling (Ionides, 2008)

Under w the pool is a sample of sigma, whichever proposal drew it. While proposals are poor, a few
sequences have all the weight; c is the largest value under which the ESS of W reaches a given
number. The first proposals learn from a tempered target instead, p^(0) phi^b with b <= 1, so that
more sequences count:

    w'_i = p^(0)(s_i) phi(s_i)^b / q_r(s_i), truncated likewise

b is the largest power with which their ESS reaches a given number.

The proposal of a round does not depend on the draws of that round, so E[w_i] = Z_sigma whatever the
earlier rounds were. The weights of a mixture of all proposals (adaptive multiple importance
sampling; Cornuet et al., 2012) vary less but are not used: a later proposal overfits the earlier
sequences and assigns them high probability, which hides how little is known. N sequences, T tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distill.pooled.forced import forced_draws
from distill.pooled.pieces import Hints
from tinystories.decoder import Conditional
from tsmc.draws import effective_sample_size, normalise
from tsmc.proposal import sample_proposal
from tsmc.sigma import call_potential

HALVINGS = 40  # of the interval in which log c is searched
POWERS = 2.0 ** -torch.arange(0, 14, 0.125, dtype=torch.float64)  # among which b is searched


@dataclass
class Round:
    """N sequences from one proposal q_r, or those of several rounds: the pool."""

    tokens: Tensor  # [N, T]
    log_weights: Tensor  # [N] log w, float64
    log_phi: Tensor  # [N]


def draw_round(
    base: Conditional,
    q: Conditional,
    log_phi: Callable[[Tensor], Tensor],
    count: int,
    generator: torch.Generator,
    hints: Hints = (),
) -> Round:
    """Draw N = count sequences from q_r = q, which is p^(0) = base or p^(0) with an adapter.

    With hints q_r is the mixture of `forced.py` in place of q. ValueError for weights that
    are NaN or infinite.
    """
    if hints:
        tokens, log_ratio = forced_draws(base, hints, count, generator)
    else:
        # One pass serves both, since q and p^(0) have the same hidden states.
        other_head = None if q is base else base.head
        drawn = sample_proposal(q, None, count, generator, other_head=other_head)
        tokens = drawn.tokens  # [N, T]
        log_ratio = (drawn.log_q - drawn.log_p).sum(-1)  # [N] log q_r / p^(0)
    log_phi_drawn = call_potential(log_phi, tokens)  # [N]
    # Kept in float64, because weights of all rounds are compared with each other.
    log_weights = (log_phi_drawn - log_ratio).double()
    if not bool((log_weights < torch.inf).all()):
        raise ValueError("a weight is NaN or infinite; check the potential")
    return Round(tokens, log_weights, log_phi_drawn)


def joined(rounds: Sequence[Round]) -> Round:
    columns = zip(*(vars(one).values() for one in rounds), strict=True)
    return Round(*(torch.cat(column) for column in columns))


def tempered(pool: Round, least_ess: float) -> tuple[Tensor, float]:
    """log w' [N] and b: the largest b in POWERS with which their ESS reaches least_ess * N'.

    N' > 0 is the number of sequences with phi > 0. Where no b does, that of the largest ESS.
    """
    alive = pool.log_weights > -torch.inf
    log_phi = pool.log_phi.where(alive, 0.0)  # -inf times 1 - b = 0 would be NaN
    powers = POWERS.tolist()
    candidates = [pool.log_weights - (1 - power) * log_phi for power in powers]
    ess = [effective_sample_size(log_weights).item() for log_weights in candidates]
    # Of texts with phi > 0: under a hard phi the others never count, whatever b is.
    enough = min(least_ess * alive.sum().item(), max(ess))
    chosen = next(i for i in range(len(ess)) if ess[i] >= enough)
    return candidates[chosen], powers[chosen]


def truncated(log_weights: Tensor, least_ess: float) -> Tensor:
    """W [N] of log w [N] for the largest c with which their ESS is at least least_ess * N.

    Where fewer sequences than that have a weight, all of these have equal weights. ValueError
    where no sequence has one.
    """
    alive = log_weights[log_weights > -torch.inf]
    if not len(alive):
        fault = f"none of the {len(log_weights)} sequences drawn has phi > 0"
        raise ValueError(f"{fault}; draw more, or soften the potential")
    low, high = alive.min(), alive.max()
    # Truncation biases the weights towards the proposals, so only where the ESS needs it. The ESS
    # grows as c falls, so bisection finds the largest c that is small enough.
    if effective_sample_size(log_weights) < least_ess * len(log_weights):
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            ess = effective_sample_size(log_weights.clamp(max=middle))
            if ess >= least_ess * len(log_weights):
                low = middle
            else:
                high = middle
        high = low
    return normalise(log_weights.clamp(max=high))
