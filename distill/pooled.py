"""Our learner: lines 1 and 3 of Algorithm 1 draw from q, weigh the draws, and fit q to them.

    draw    s ~ q, independent sequences without resampling; they join the pool of all draws
    weigh   w(s) = p^(0)(s) phi(s) / q(s)                               truncated, `twist/pool.py`
    fit     q <- argmin_q sum_i W_i [-log q(s_i)], an adapter of p^(0)  the weighted eq. 7

Weighted likelihood is the objective of distributional policy gradients (Parshakova et al., 2019;
Khalifa et al., 2021, who call it GDC), here with adaptive importance sampling in the manner of AMIS
(Cornuet et al., 2012): the proposal is refitted, and what it has drawn before is kept. For exact
weights the minimum is q = sigma, of all q that an adapter can be.

    line 1          a ladder of such steps from q = p^(0), each fitted to p^(0) phi^b with the
                    largest b <= 1 at which enough draws count, and the last one to sigma itself
    line 3          one step from q^(m-1)
    line 4          nothing: p^(m) = q^(m) has learned what a twist could add, so psi^(m) = 1

psi^(0)(s_{1:t}) is q^(0)_t(s_t) / p^(0)(s_t | s_{0:t-1}), and for m >= 1 psi^(m) is 1; the pair
(p^(0), psi^(0)) is kept as (q^(0), 1), which is the same by eq. 8. The ladder follows the tempered
targets of adaptive multilevel twisted SMC (arXiv:2608.21736). Each fit may use the scores g of the
surrogate (`twist/surrogate.py`), a logistic regression of phi on all draws: few draws have a
weight, but all have a score. N sequences in the pool, U updates, n rows of a batch, T tokens, D
width, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from distill.options import check_all, option
from distill.self_distill import draw_batches, self_distill
from tinystories.decoder import counted, padded
from tinystories.errors import InputError
from tsmc.interfaces import BaseModel, LanguageModel, Report, row_slices
from tsmc.runs import Phases, chunk_sizes
from twist.adapter import Adapted, Adapter
from twist.ctl import EXPLODED
from twist.pair import Pair
from twist.pool import Pool, Round, draw_round, tempered, truncated
from twist.surrogate import fit_surrogate

GROUP = 256  # prefixes of a step are padded to a multiple of this, so freed blocks are reused


@dataclass(frozen=True)
class PooledOptions:
    surrogate: bool = option(True, "let the adapter see a score of phi for each token")
    pool_first_draws: int = option(7000, "sequences drawn for psi^(0)", 1)
    pool_first_rounds: int = option(8, "steps of the ladder that they are drawn in", 1)
    pool_first_ess: float = option(
        0.1, "share of the texts with phi > 0 that the ESS of a step must reach", 0, 1
    )
    pool_first_updates: int = option(30, "gradient steps of a step of the ladder", 1)
    pool_draws: int = option(9000, "sequences drawn from q in each further generation", 1)
    pool_least_ess: float = option(0.05, "truncate weights to an ESS of this share of all", 0, 1)
    pool_updates: int = option(120, "gradient steps of each generation", 1)
    pool_batch_size: int = option(64, "sequences of one step", 1)
    pool_learning_rate: float = option(1e-4, "Adam's step size", 0, 1)
    pool_hidden_units: int = option(192, "width of the adapter's two hidden layers", 1)

    def __post_init__(self):
        check_all(self)

    def ladder(self) -> list[int]:
        """Sequences of each step of the ladder."""
        at_once = math.ceil(self.pool_first_draws / self.pool_first_rounds)
        return chunk_sizes(self.pool_first_draws, at_once)


class Pooled:
    """Lines 1, 3 and 4 for p^(0) = base and log_phi(tokens [N, T]) -> log phi [N]."""

    def __init__(
        self,
        base: BaseModel,
        log_phi: Callable[[Tensor], Tensor],
        options: PooledOptions,
        phases: Phases,
        scale: float = 1.0,
    ):
        """`scale` is c of the surrogate (`twist/surrogate.py`): beta for a classifier."""
        self.base = base
        self.log_phi = log_phi
        self.options = options
        self.phases = phases
        self.scale = scale
        self.pool = Pool()

    def plan(self, m: int) -> dict[str, float]:
        """The phases of generation m and their work, about that of drawing so many sequences."""
        options = self.options
        update = 0.4 * options.pool_batch_size
        *climb, last = options.ladder()
        plan = {}
        if m == 0:
            for step, count in enumerate(climb, 1):
                plan[f"ladder {step} sampling"] = float(count)
                plan |= self.plan_of_fit(f"ladder {step}", update * options.pool_first_updates)
        plan["sampling"] = float(options.pool_draws if m else last)
        return plan | self.plan_of_fit("distillation", update * options.pool_updates)

    def plan_of_fit(self, phase: str, work: float) -> dict[str, float]:
        """The phases of a fit."""
        surrogate = {f"{phase} surrogate": 0.0} if self.options.surrogate else {}
        return surrogate | {phase: work}

    def scores(self, generations: int) -> int:
        """How many texts phi has scored after so many generations."""
        return self.options.pool_first_draws + generations * self.options.pool_draws

    def line_1(self) -> Pair:
        """psi^(0) = q^(0) / p^(0), kept as q^(0): the last step of the ladder."""
        *climb, last = self.options.ladder()
        q = None
        for step, count in enumerate(climb, 1):
            self.draw(q, f"ladder {step} sampling", 0, count)
            # Without a single phi > 0 there is nothing to fit, and p^(0) proposes once more.
            if self.pool.is_alive().any():
                q = self.fit(f"ladder {step}", 0, self.options.pool_first_updates, q, True)
        self.draw(q, "sampling", 0, last)
        return Pair(Adapted(self.base, self.fit_to_sigma(0)), None)

    def line_3(self, pair: Pair, m: int) -> LanguageModel:
        """p^(m) = q^(m), fitted to all draws so far, to which q^(m-1) adds."""
        self.draw(pair.model.adapter, "sampling", m, self.options.pool_draws)
        return Adapted(self.base, self.fit_to_sigma(m))

    def line_4(self, model: LanguageModel, m: int) -> Pair:
        """psi^(m) = 1."""
        # q^(m) is the fitted proposal already; a twist could only learn what it has missed.
        return Pair(model, None)

    def draw(self, q: Adapter | None, phase: str, m: int, count: int) -> None:
        """Draw and weigh: `count` sequences of q join the pool; None is p^(0)."""
        base = self.base
        twist = None if q is None else q.tilt  # one pass gives log q and log p^(0)

        def draw(size: int, generator: torch.Generator) -> dict[str, Tensor]:
            return vars(draw_round(base, twist, self.log_phi, size, generator))

        self.pool.rounds.append(Round(**self.phases.draw(phase, m, count, draw)))

    def fit_to_sigma(self, m: int) -> Adapter:
        """q^(m): an adapter of p^(0), learned anew from the whole pool."""
        # Anew, because an adapter that goes on learns the few heavy texts by heart.
        return self.fit("distillation", m, self.options.pool_updates, None, False)

    def fit(
        self, phase: str, m: int, updates: int, start: Adapter | None, is_tempered: bool
    ) -> Adapter:
        """Fit q to the pool, from the MLP of `start` or from p^(0); the surrogate comes first."""
        options = self.options
        scores = self.fit_scores(f"{phase} surrogate", m) if options.surrogate else None
        log_weights, power = self.pool.log_weights(), 1.0
        if is_tempered:
            log_weights, power = tempered(self.pool, options.pool_first_ess)
        weights = truncated(log_weights, options.pool_least_ess)
        positive = self.pool.is_alive().double().mean().item()

        def learn(generator: torch.Generator, report: Report) -> dict[str, Tensor]:
            embeddings = self.base.output_embeddings
            adapter = Adapter(embeddings, scores, options.pool_hidden_units, generator)
            # Targets of the ladder are alike, so a few steps from the last MLP suffice.
            if start is not None:
                adapter.shift.load_state_dict(start.shift.state_dict())
            optimizer = torch.optim.Adam(adapter.shift.parameters(), lr=options.pool_learning_rate)
            batches = draw_batches(weights, options.pool_batch_size, updates, generator)
            told = partial(report, power=power, positive=positive)
            fit_adapter(adapter, optimizer, self.base, self.pool.tokens(), batches, told)
            return adapter.state_dict()

        tensors = self.phases.once(phase, m, updates, learn)
        adapter = Adapter.like(tensors, self.base)
        adapter.load_state_dict(tensors)
        return adapter.requires_grad_(False)

    def fit_scores(self, phase: str, m: int) -> Tensor:
        """The scores g [V] of the surrogate, fitted to all draws alike."""

        def learn(generator: torch.Generator, report: Report) -> dict[str, Tensor]:
            pool, vocab_size = self.pool, self.base.vocab_size
            scores, loss = fit_surrogate(pool.tokens(), pool.log_phi(), self.scale, vocab_size)
            report(loss=loss)
            return {"scores": scores}

        return self.phases.once(phase, m, 1, learn)["scores"]


def fit_adapter(
    adapter: Adapter,
    optimizer: torch.optim.Optimizer,
    base: BaseModel,
    tokens: Tensor,
    batches: Tensor,
    report: Report,
) -> None:
    """Minimise eq. 7 in place for rows `batches` [U, n] of tokens [N, T].

    p^(0) = base is not trained, so the states of each sequence that occurs are computed once, and
    a step computes the logits of q once for the S prefixes s_{1:t-1} that differ in its batch.
    """
    # Most texts have hardly any weight; those that no batch draws need no states.
    distinct, places = batches.unique(return_inverse=True)
    tokens = tokens[distinct]  # [M, T]
    states = hidden_states(base, tokens).flatten(0, 1)  # [M T, D]
    prefixes = first_places(tokens)  # [M, T]
    is_counted = counted(tokens, base.end)  # [M, T]

    def loss(rows: Tensor) -> Tensor:
        some = is_counted[rows]  # [n, T]
        # Texts share beginnings, and the V logits after each of them are the main cost.
        chosen, place = prefixes[rows][some].unique(return_inverse=True)  # [S]
        log_q = adapter(states[padded(chosen, GROUP)]).log_softmax(-1)  # [S, V]
        return -log_q[place, tokens[rows][some]].mean()

    self_distill(loss, optimizer, places, report)
    with torch.no_grad():
        largest = adapter.tilt(states[:GROUP]).abs().max().item()
    if not largest < EXPLODED:
        raise InputError(f"the adapter has exploded to {largest:.0f} nats; lower its learning rate")


def first_places(tokens: Tensor) -> Tensor:
    """For each s_{1:t-1} of tokens [M, T], its first place [M, T] in tokens.flatten()."""
    rows, length = tokens.shape
    number = torch.zeros_like(tokens[:, 0])  # [M] of the prefix among those that differ
    places = []
    for t in range(length):
        first = torch.full_like(number, rows).scatter_reduce(
            0, number, torch.arange(rows, device=tokens.device), "amin"
        )
        places.append(first[number] * length + t)
        # A prefix is its parent's number and its last token; numbered anew, it stays small.
        pairs = number * (tokens.max() + 1) + tokens[:, t]
        number = pairs.unique(return_inverse=True)[1]
    return torch.stack(places, 1)


@torch.no_grad()
def hidden_states(model: LanguageModel, tokens: Tensor) -> Tensor:
    """The states [N, T, D] from which the model predicts sequences [N, T], in slices."""
    slices = row_slices(len(tokens), model.vocab_size * tokens.shape[1])
    return torch.cat([model.states(tokens[rows]) for rows in slices])
