"""The paper's learner: lines 1, 3 and 4 of Algorithm 1.

    line 1   psi^(0) <- CTL on p^(0)                                                        eq. 6
    line 3   p^(m)   <- argmin_p E[-log p(s)] over samples s of TSMC(p^(m-1), psi^(m-1))    eq. 7
    line 4   psi^(m) <- CTL-m on p^(m): sigma is proportional to p^(m) phi^(m),             eq. 8
                        phi^(m) = p^(0) phi / p^(m)

p^(m) is p^(m-1), fine-tuned on samples of R runs of K particles, which count alike. A fifth of the
runs is held out, and the parameters with their least loss are kept. By default a run resamples at
T alone; with --ess-threshold 1 at every step, as in the paper. N texts, U updates of n rows.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from distill.finetune import Best, Student
from distill.pair import Pair
from tinystories.decoder import Conditional
from tsmc.draws import SCHEMES, effective_sample_size
from tsmc.proposal import sequence_log_probs
from tsmc.sampler import Population, Rule, tsmc
from tsmc.sigma import Sigma
from tsmc.streams import Streams, progress, side_by_side
from twist.ctl import Batch, ctl_loss, draw_batch
from twist.mlp import TwistMLP

BATCH_SIZE = 32  # sequences of an update of the language model
HELD_OUT = 5  # one run of so many is not learned
HELD_EVERY = 10  # and of its particles one of so many is enough
CHECKED = 10  # the loss of the runs held out is computed once in so many updates
PATIENCE = 3  # checks without a lower loss, after which line 3 ends


class Paper:
    """CTL and fine-tuning of base = p^(0) for log_phi(tokens [N, T]) [N]; others are subclasses."""

    defaults: ClassVar[dict[str, Any]] = {}  # options of which a learner has another default
    is_policy = False  # whether p^(m) is a policy, whose texts no weight corrects

    def __init__(
        self, base: Conditional, log_phi: Callable[[Tensor], Tensor], options: Any, streams: Streams
    ):
        self.base = base
        self.log_phi = log_phi
        self.options = options
        self.streams = streams
        self.rule = Rule(SCHEMES[options.resampling], options.ess_threshold)
        self.figures: dict[str, list[float]] = {}  # of the steps of this generation, by name

    def sigma(self, model: Conditional) -> Sigma:
        """The target, as p^(m) = model sees it."""
        return Sigma(model, self.base, self.log_phi, self.options.effective_potential)

    def is_independent(self, pair: Pair) -> bool:
        """Whether particles of a run are, because no run resamples before T."""
        return self.rule.threshold(self.sigma(pair.model)) == 0

    def population(self, pair: Pair, word: str, m: Any, particles: int, runs: int) -> Population:
        """R runs of K particles, from the stream of a word; ValueError where all ended dead."""
        sigma = self.sigma(pair.model)
        twist = pair.twist
        draw = lambda n, source: tsmc(sigma, twist, particles, source, n, self.rule)  # noqa: E731
        population = self.streams.draw(word, m, runs, draw, particles)
        if not (population.log_z > -torch.inf).any():
            fault = f"all {runs} runs of {particles} particles ended with weight zero"
            raise ValueError(f"{fault}: draw more, or soften the potential, as keyword~8:WORD")
        return population

    def note(self, **figures: Any) -> None:
        """Keep figures of a step, which end up in the row of the generation."""
        for name, value in figures.items():
            self.figures.setdefault(name, []).append(float(value))

    def distil(self, pair: Pair, m: int) -> Conditional:
        """Line 3: p^(m), fine-tuned from p^(m-1) on samples of TSMC(p^(m-1), psi^(m-1))."""
        options = self.options
        drawn = self.population(pair, "sampling", m, options.particles, options.distill_runs)
        samples = drawn.alive().samples  # [R, K, T]; runs whose weights are all zero have none
        # Whole runs, because the particles of one may be copies; one that is alone is both.
        num_held = max(1, len(samples) // HELD_OUT)
        held = samples[:num_held, ::HELD_EVERY].flatten(0, 1)  # [H, T]
        tokens = samples[num_held:].flatten(0, 1) if len(samples) > 1 else samples[0]  # [N, T]
        self.note(distinct_texts=len(tokens.unique(dim=0)))
        generator = self.streams.stream("distillation", m)
        rate = options.distill_learning_rate * {"full": 1, "lora": 30}[options.student]
        student = Student(pair.model.network, rate, options.student == "lora", generator)
        model = self.base.with_network(student.network)
        size = (options.distill_updates, BATCH_SIZE)  # U, n
        even = torch.ones(len(tokens), device=tokens.device)
        batches = torch.multinomial(even, math.prod(size), True, generator=generator).view(size)
        best = Best(student.network, PATIENCE)
        best.is_over(-sequence_log_probs(model, held).mean().item())  # p^(m-1) may be the best

        def learn(rows: Tensor) -> Tensor:  # some of a batch
            loss = -model.log_probs(tokens[rows]).sum() / (BATCH_SIZE * tokens.shape[1])  # eq. 7
            loss.backward()
            return loss.detach()

        for update, rows in enumerate(progress(batches, "distillation", m), 1):
            parts = rows.chunk(1 if rows.is_cuda else 2)
            self.note(distillation_loss=sum(side_by_side(learn, parts, rows.device)))
            student.step()
            is_checked = update % CHECKED == 0 or update == options.distill_updates
            if is_checked and best.is_over(-sequence_log_probs(model, held).mean().item()):
                break
        best.restore()
        self.figures["held_out_loss"] = best.losses  # -log p of a text
        return self.base.with_network(student.finish())

    def learn_twist(self, model: Conditional, m: int) -> Pair:
        """Lines 1 and 4: p^(m) = model, and psi^(m) by CTL against the same sigma, from psi = 1."""
        options = self.options
        generator = self.streams.stream("twist learning", m)
        # From psi = 1: the last twist was fitted to another p, whose states were others.
        psi = TwistMLP(model.width, model.vocab_size, generator)
        optimizer = torch.optim.Adam(psi.parameters(), lr=options.ctl_learning_rate, fused=True)
        sigma = self.sigma(model)
        for update in progress(range(options.ctl_updates), "twist learning", m):
            falling = 1 - 0.9 * update / options.ctl_updates
            optimizer.param_groups[0]["lr"] = options.ctl_learning_rate * falling
            batch = draw_batch(sigma, psi, options.ctl_batch_size, generator)
            ess = effective_sample_size(batch.log_positive()).item()
            self.note(twist_ess=ess)
            if ess > 0:  # otherwise phi is zero on the whole batch, which teaches nothing
                optimizer.zero_grad()
                self.twist_loss(psi, batch, model).backward()
                optimizer.step()
        return Pair(model, psi.requires_grad_(False))

    def twist_loss(self, psi: TwistMLP, batch: Batch, model: Conditional) -> Tensor:
        """A scalar whose gradient psi descends: that of CTL (eq. 6), unless told otherwise."""
        return ctl_loss(psi, batch)

    def scored(self, m: int) -> int:
        """How many texts phi has read up to generation m: those of CTL and the distilled runs."""
        options = self.options
        learning = (m + 1) * options.ctl_updates * options.ctl_batch_size
        return learning + m * options.distill_runs * options.particles

    def state(self) -> dict[str, Tensor]:
        """What the learner needs to go on, beside the last pair."""
        return {}

    def resume(self, state: dict[str, Tensor]) -> None:
        """Go on with a state that was kept."""
