"""The paper's learner: lines 1, 3 and 4 of Algorithm 1.

    line 1   psi^(0) <- CTL on p^(0)                                                        eq. 6
    line 3   p^(m)   <- argmin_p E[-log p(s)] over samples s of TSMC(p^(m-1), psi^(m-1))    eq. 7
    line 4   psi^(m) <- CTL-m on p^(m): sigma is proportional to p^(m) phi^(m),             eq. 8
                        phi^(m) = p^(0) phi / p^(m)

psi^(m) is learned from psi = 1 in every generation, and p^(m) is p^(m-1) with all parameters or
LoRA fine-tuned. The samples are those of R independent runs of K particles, which all count the
same, whatever their Z-hat.

By default runs resample multinomially at every step, as in the paper. With --ess-threshold 0 a run
resamples at the last token alone, and until then it is importance sampling from q. Another
objective for psi is a subclass with another `twist_loss`. R runs, K particles, N = R K samples, T
tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from distill.finetune import Student, draw_batches
from distill.learner import Learner
from distill.options import option
from distill.pair import Pair
from tinystories.decoder import Conditional, counted
from tsmc.draws import SCHEMES, normalise
from tsmc.processes import progress
from tsmc.sampler import Rule
from tsmc.sigma import Sigma, seen_from
from twist.ctl import OBJECTIVES, Batch, draw_batch
from twist.mlp import TwistMLP

BATCH_SIZE = 32  # sequences of an update of the language model


@dataclass(frozen=True)
class PaperOptions:
    particles: int = option(100, "K, particles of a run")
    resampling: str = option("multinomial", "resampling scheme", choices=tuple(SCHEMES))
    ess_threshold: float = option(1.0, "resample where ESS / K is lower; 1: at every step", high=1)
    effective_potential: bool = option(True, "use phi^(m), so that sigma stays the target")
    student: str = option("full", "what is fine-tuned", choices=("full", "lora"))
    objective: str = option("ctl", "what psi learns by", choices=tuple(OBJECTIVES))
    ctl_updates: int = option(140, "gradient steps for each twist")
    ctl_batch_size: int = option(100, "sequences drawn i.i.d. from q for one step")
    ctl_learning_rate: float = option(3e-4, "Adam's step size; falls linearly to a tenth", high=1)
    distill_runs: int = option(300, "R, TSMC runs that are distilled")
    distill_updates: int = option(80, "gradient steps for each language model")
    distill_learning_rate: float = option(
        3e-5, "AdamW's step size, for LoRA ten times that", high=1
    )


class Paper(Learner):
    """CTL and fine-tuning, with PaperOptions."""

    Options = PaperOptions

    def first_twist(self) -> Pair:
        """Line 1: psi^(0) by CTL on p^(0)."""
        return self.learn_twist(self.base, 0)

    def distil(self, pair: Pair, m: int) -> Conditional:
        """Line 3: p^(m), fine-tuned from p^(m-1) on samples of TSMC(p^(m-1), psi^(m-1))."""
        options = self.options
        # psi^(m-1) was learned for p^(m-1) and phi^(m-1), so the runs use this pair as well.
        given = (pair, "sampling", m, options.particles, options.distill_runs)
        population = self.population(*given).alive()
        # Runs that die have no samples; the others count alike, because their Z-hat varies so much
        # with a poor twist that one run would be nearly all that is distilled.
        if options.ess_threshold == 1:
            tokens = population.samples.flatten(0, 1)  # [N, T]
            weights = tokens.new_full((len(tokens),), 1 / len(tokens), dtype=torch.float32)  # [N]
        else:
            tokens = population.tokens.flatten(0, 1)
            weights = normalise(population.log_weights).flatten() / len(population.log_z)
        self.record("distilled texts", m, distinct=len(tokens.unique(dim=0)))
        generator = self.streams.stream("distillation", m)
        is_lora = options.student == "lora"
        rate = options.distill_learning_rate * (10 if is_lora else 1)
        student = Student(pair.model.network, rate, is_lora, generator)
        model = self.base.with_network(student.network)
        batches = draw_batches(weights, BATCH_SIZE, options.distill_updates, generator)  # [U, n]
        for rows in progress(batches, "distillation", m):
            is_counted = counted(tokens[rows], model.end)  # [n, T]
            log_p = model.log_probs(tokens[rows])[0]  # [n, T]
            # A mean over tokens, so that one step size suits every length T.
            loss = -log_p[is_counted].sum() / is_counted.sum()
            loss.backward()
            student.step()
            self.record("distillation", m, loss=loss.detach())
        return self.base.with_network(student.finish(m))

    def learn_twist(self, model: Conditional, m: int) -> Pair:
        """Lines 1 and 4: p^(m) = model, and psi^(m) by CTL against the same sigma, from psi = 1."""
        options = self.options
        generator = self.streams.stream("twist learning", m)
        # From psi = 1: the last twist was fitted to another p, whose states were others.
        psi = TwistMLP(model.width, model.vocab_size, generator)
        optimizer = torch.optim.Adam(psi.parameters(), lr=options.ctl_learning_rate, fused=True)
        sigma = self.sigma(model)
        for update in progress(options.ctl_updates, "twist learning", m):
            falling = 1 - 0.9 * update / options.ctl_updates
            optimizer.param_groups[0]["lr"] = options.ctl_learning_rate * falling
            batch = draw_batch(sigma, psi, options.ctl_batch_size, generator)
            if not batch.is_sound():
                fault = f"twist learning of generation {m}: psi has exploded or phi is not finite"
                raise ValueError(f"{fault}; lower --ctl-learning-rate, or check the potential")
            loss, ess = self.twist_loss(psi, batch), batch.ess()
            self.record("twist learning", m, loss=loss.detach(), ess=ess)
            if ess > 0:  # otherwise phi is zero on the whole batch, which teaches nothing
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return Pair(model, psi.requires_grad_(False))

    def twist_loss(self, psi: TwistMLP, batch: Batch) -> Tensor:
        """A scalar whose gradient psi descends: that of CTL (eq. 6), unless told otherwise."""
        return OBJECTIVES[self.options.objective](psi, batch)

    def sigma(self, model: Conditional) -> Sigma:
        return seen_from(model, self.base, self.log_phi, self.options.effective_potential)

    @staticmethod
    def rule(options: PaperOptions) -> Rule:
        return Rule(SCHEMES[options.resampling], options.ess_threshold)

    def scores(self, generations: int) -> int:
        """Every text that twist learning or a distilled run has drawn."""
        options = self.options
        learning = (generations + 1) * options.ctl_updates * options.ctl_batch_size
        return learning + generations * options.distill_runs * options.particles
