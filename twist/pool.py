"""The pool: every sequence drawn so far, weighted by the proposal that drew it.

    w_i = p^(0)(s_i) phi(s_i) / q_r(s_i)         round r drew s_i from q_r
    W_i = min(w_i, c) / sum_j min(w_j, c)        truncated importance sampling (Ionides, 2008)

Under w the pool is a sample of sigma, whichever generation drew it, because p^(m) phi^(m) = p^(0)
phi (eq. 8). Self-distillation (`distill/self_distill.py`) and the value (`twist/value.py`) learn
from it. While proposals are poor, a few sequences have all the weight; c is the largest value under
which the ESS of W reaches a given number. Proposals of the first rounds learn from a tempered
target instead, p^(0) phi^b with b <= 1, so that more sequences count:

    w'_i = p^(0)(s_i) phi(s_i)^b / q_r(s_i), truncated alike

b is the largest power with which their ESS reaches a given number.

The proposal of a round does not depend on the draws of that round, so E[w_i] = Z_sigma whatever the
earlier rounds were. The weights of a mixture of all proposals (adaptive multiple importance
sampling; Cornuet et al., 2012) vary less but are not used: a later proposal overfits the earlier
sequences and assigns them high probability, which hides how little is known. N sequences, T tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinystories.errors import InputError
from tsmc.categorical import widest
from tsmc.interfaces import LanguageModel, Twist, row_slices
from tsmc.proposal import sample_proposal, sequence_log_probs
from tsmc.resampling import effective_sample_size, normalise

HALVINGS = 40  # of the interval in which log c is searched
POWERS = 2.0 ** -torch.arange(0, 14, 0.125, dtype=torch.float64)  # among which b is searched


@dataclass
class Round:
    """N sequences from one proposal q_r."""

    tokens: Tensor  # [N, T]
    log_weights: Tensor  # [N] log w, float64
    log_phi: Tensor | None = None  # [N]


def draw_round(
    model: LanguageModel,
    twist: Twist | None,
    base: LanguageModel | None,
    log_phi: Callable[[Tensor], Tensor],
    count: int,
    generator: torch.Generator,
) -> Round:
    """Draw N = count sequences from q_r, the proposal of model and twist, without resampling.

    `base` is p^(0) unless the model is; log_phi(tokens [N, T]) is [N]. InputError for bad weights.
    """
    draws = sample_proposal(model, twist, count, generator)
    log_p = draws.log_p.sum(-1) if base is None else sequence_log_probs(base, draws.tokens)  # [N]
    score = log_phi(draws.tokens)  # [N]
    log_weights = (log_p + score - draws.log_q.sum(-1)).to(widest(score.device))
    if not bool((log_weights < torch.inf).all()):
        raise InputError("a weight is NaN or infinite; check the potential")
    return Round(draws.tokens, log_weights, score)


@dataclass
class Pool:
    """Weighted sequences from all rounds, and the surrogate's scores g [V] if it is fitted."""

    rounds: list[Round] = field(default_factory=list)
    scores: Tensor | None = None

    def tokens(self) -> Tensor:
        """The sequences [N, T] of all rounds."""
        return torch.cat([one.tokens for one in self.rounds])

    def log_phi(self) -> Tensor:
        """Their log phi [N]."""
        return torch.cat([one.log_phi for one in self.rounds if one.log_phi is not None])

    def log_weights(self) -> Tensor:
        """Their log w [N]."""
        return torch.cat([one.log_weights for one in self.rounds])

    def tempered(self, least_ess: float) -> "Pool":
        """The pool as a sample of p^(0) phi^b: the largest b in POWERS with ESS >= least_ess * N'.

        N' > 0 is the number of sequences with phi > 0. Where no b does, that of the largest ESS.
        """
        log_weights = self.log_weights()
        alive = log_weights > -torch.inf
        log_phi = self.log_phi().where(alive, 0.0)
        tempered = [log_weights - (1 - power) * log_phi for power in POWERS.tolist()]
        ess = [effective_sample_size(one).item() for one in tempered]
        enough = min(least_ess * alive.sum().item(), max(ess))
        chosen = next(i for i in range(len(ess)) if ess[i] >= enough)
        return Pool([Round(self.tokens(), tempered[chosen], self.log_phi())], self.scores)

    def weights(self, least_ess: float) -> Tensor:
        """W [N] for the largest c with which their ESS is at least least_ess * N.

        Where fewer sequences than that have a weight, all of these have equal weights. InputError
        where no sequence has one.
        """
        log_weights = self.log_weights()
        alive = log_weights[log_weights > -torch.inf]
        if not len(alive):
            fault = f"none of the {len(log_weights)} sequences drawn has phi > 0"
            raise InputError(f"{fault}; draw more, or soften the potential")
        low = alive.min()
        high = alive.max()
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


def draw_rows(weights: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The distinct rows among `count` draws by weights [N], and the place there of each draw."""
    drawn = torch.multinomial(weights, count, replacement=True, generator=generator)
    return drawn.unique(return_inverse=True)


@torch.no_grad()
def hidden_states(model: LanguageModel, tokens: Tensor) -> Tensor:
    """The states [N, T, D] from which the model predicts sequences [N, T], in slices."""
    slices = row_slices(len(tokens), model.vocab_size * tokens.shape[1])
    return torch.cat([model.states(tokens[rows]) for rows in slices])
