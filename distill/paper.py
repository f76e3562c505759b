"""The paper's learner: lines 1, 3 and 4 of Algorithm 1.

    line 1   psi^(0) <- CTL on p^(0)                                                        eq. 6
    line 3   p^(m)   <- argmin_p E[-log p(s)] over samples s of TSMC(p^(m-1), psi^(m-1))    eq. 7
    line 4   psi^(m) <- CTL-m on p^(m): sigma is proportional to p^(m) phi^(m),             eq. 8
                        phi^(m) = p^(0) phi / p^(m)

psi^(m) is learned from psi = 1 in every generation, and p^(m) is p^(m-1) with all parameters or
LoRA fine-tuned. The samples are those of R independent runs of K particles, which all count the
same, whatever their Z-hat.

`paper` has the defaults below: multinomial resampling at every step, and the resampled particles
are distilled. `weighted` is the same learner with those of WEIGHTED: a run resamples at the last
token alone, and what is distilled are the particles with the weights of that resampling, which have
the expectation of resampled ones and fewer copies (D2 and D5 of docs/method.md). Until the last
token such a run is importance sampling from q. R runs, K particles, N = R K samples, T tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distill.finetune import Student, draw_batches
from distill.learner import Learner, check_all, option
from tinystories.decoder import counted
from tinystories.errors import InputError
from tsmc import processes
from tsmc.interfaces import BaseModel
from tsmc.resampling import SCHEMES, normalise
from tsmc.sampler import Sigma
from twist.ctl import ctl_loss, draw_batch
from twist.mlp import FORMS, make_twist
from twist.pair import Pair
from twist.potential import seen_from

BATCH_SIZE = 32  # sequences of an update of the language model


@dataclass(frozen=True)
class PaperOptions:
    particles: int = option(100, "K, particles of a run", 1)
    resampling: str = option("multinomial", "resampling scheme", choices=SCHEMES)
    ess_threshold: float = option(1.0, "resample where ESS / K is lower; 1: at every step", 0, 1)
    effective_potential: bool = option(True, "use phi^(m), so that sigma stays the target")
    student: str = option("full", "what is fine-tuned", choices=("full", "lora"))
    twist: str = option("mlp", "the form of psi", choices=FORMS)
    ctl_updates: int = option(140, "gradient steps for each twist", 1)
    ctl_batch_size: int = option(100, "sequences drawn i.i.d. from q for one step", 2)
    ctl_learning_rate: float = option(3e-4, "Adam's step size; falls linearly to a tenth", 0, 1)
    distill_runs: int = option(300, "R, TSMC runs that are distilled", 1)
    distill_updates: int = option(80, "gradient steps for each language model", 1)
    distill_learning_rate: float = option(3e-5, "AdamW's step size, for LoRA ten times that", 0, 1)

    def __post_init__(self):
        check_all(self)


WEIGHTED = {
    "particles": 50,
    "resampling": "systematic",
    "ess_threshold": 0.0,
    "ctl_updates": 70,
    "distill_updates": 120,
}
"""What `weighted` sets in place of the defaults above."""


class Paper(Learner):
    """CTL and fine-tuning, with PaperOptions."""

    def first_twist(self) -> Pair:
        """Line 1: psi^(0) by CTL on p^(0)."""
        return self.learn_twist(self.base, 0)

    def distil(self, pair: Pair, m: int) -> BaseModel:
        """Line 3: p^(m), fine-tuned from p^(m-1) on samples of TSMC(p^(m-1), psi^(m-1))."""
        options = self.options
        tokens, weights = self.samples(pair, m)
        self.report("distilled texts", m, 1, distinct=len(tokens.unique(dim=0)))
        generator = self.streams.stream("distillation", m)
        is_lora = options.student == "lora"
        rate = options.distill_learning_rate * (10 if is_lora else 1)
        student = Student(pair.model.network, rate, is_lora, generator)
        model = self.base.with_network(student.network)
        for rows in draw_batches(weights, BATCH_SIZE, options.distill_updates, generator):
            is_counted = counted(tokens[rows], model.end)  # [n, T]
            own = processes.own_rows(len(rows))
            log_p = model.log_probs(tokens[rows[own]])[0]  # [n, T]
            # A mean over tokens, so that one step size suits every length T.
            loss = -log_p[is_counted[own]].sum() / is_counted.sum()
            loss.backward()
            student.step()
            self.report("distillation", m, options.distill_updates, loss=loss.detach())
        return self.base.with_network(student.finish(m))

    def samples(self, pair: Pair, m: int) -> tuple[Tensor, Tensor]:
        """Sequences [N, T] of the runs that did not die, and weights [N] that sum to one."""
        options = self.options
        # psi^(m-1) was learned for p^(m-1) and phi^(m-1), so the runs use this pair as well.
        sizes = (options.particles, options.distill_runs)
        population = self.population(pair, "sampling", m, *sizes).alive()
        # Runs that die have no samples; the others count alike, because their Z-hat varies so much
        # with a poor twist that one run would be nearly all that is distilled.
        if options.ess_threshold == 1:
            tokens = population.samples.flatten(0, 1)  # [N, T]
            return tokens, tokens.new_full((len(tokens),), 1 / len(tokens), dtype=torch.float32)
        weights = normalise(population.log_weights) / len(population.log_z)  # [R, K]
        return population.tokens.flatten(0, 1), weights.flatten()

    def learn_twist(self, model: BaseModel, m: int) -> Pair:
        """Lines 1 and 4: p^(m) = model, and psi^(m) by CTL against the same sigma, from psi = 1."""
        options = self.options
        generator = self.streams.stream("twist learning", m)
        # From psi = 1: the last twist was fitted to another p, whose states were others.
        psi = make_twist(options.twist, model, generator)
        optimizer = torch.optim.Adam(psi.parameters(), lr=options.ctl_learning_rate)
        sigma = self.sigma(model)
        updates = options.ctl_updates
        for update in range(updates):
            falling = 1 - 0.9 * update / updates
            optimizer.param_groups[0]["lr"] = options.ctl_learning_rate * falling
            batch = draw_batch(sigma, psi, options.ctl_batch_size, generator)
            if not batch.is_sound:
                fault = f"twist learning of generation {m}: psi has exploded or phi is not finite"
                raise InputError(f"{fault}; lower --ctl-learning-rate, or check the potential")
            loss = ctl_loss(psi, batch)
            figures = {"loss": loss.detach(), "ess": batch.ess}
            self.report("twist learning", m, updates, **figures)
            if batch.ess > 0:  # otherwise phi is zero on the whole batch, which teaches nothing
                optimizer.zero_grad()
                loss.backward()
                processes.sum_gradients(psi.parameters())
                optimizer.step()
        return Pair(model, psi.requires_grad_(False))

    def sigma(self, model: BaseModel) -> Sigma:
        """The target, as p^(m) = model sees it."""
        return seen_from(model, self.base, self.log_phi, self.options.effective_potential)

    @staticmethod
    def rule(options: PaperOptions) -> dict[str, Any]:
        """How runs resample."""
        return {"resample": SCHEMES[options.resampling], "ess_threshold": options.ess_threshold}

    def scores(self, generations: int) -> int:
        """How many texts phi has scored after so many generations: all that are drawn."""
        options = self.options
        learning = (generations + 1) * options.ctl_updates * options.ctl_batch_size
        return learning + generations * options.distill_runs * options.particles
