"""The paper's learner: lines 1, 3 and 4 of Algorithm 1.

    line 1   psi^(0) <- CTL on p^(0)                                                        eq. 6
    line 3   p^(m)   <- argmin_p E[-log p(s)] over samples s of TSMC(p^(m-1), psi^(m-1))    eq. 7
    line 4   psi^(m) <- CTL-m on p^(m): sigma is proportional to p^(m) phi^(m),             eq. 8
                        phi^(m) = p^(0) phi / p^(m)

p^(m) is p^(m-1), fine-tuned on samples of R independent runs of K particles, which count alike
whatever their Z-hat is. A fifth of the runs is held out, and the parameters with their least loss
are kept, perhaps those before the first update.

By default a run resamples at the last token alone, and until then it is importance sampling from q;
with --ess-threshold 1 it resamples at every step, as in the paper. Another objective for psi is a
subclass with another `twist_loss`. R runs, K particles, N texts that are learned, U updates, n rows
of a batch, T tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from distill.finetune import Best, Student, draw_batches
from distill.learner import Learner
from distill.options import option
from distill.pair import Pair
from tinystories.decoder import Conditional, counted
from tsmc.draws import SCHEMES
from tsmc.processes import progress
from tsmc.proposal import sequence_log_probs
from tsmc.sampler import Rule
from tsmc.sigma import Sigma, seen_from
from twist.ctl import Batch, draw_batch
from twist.mlp import TwistMLP
from twist.objectives import OBJECTIVES

BATCH_SIZE = 32  # sequences of an update of the language model
HELD_OUT = 5  # one run of so many is not learned
HELD_EVERY = 10  # and of its particles one of so many is enough
BEGINNING = 5  # tokens by which beginnings are told apart
CHECKED = 10  # the loss of the runs held out is computed once in so many updates
PATIENCE = 3  # checks without a lower loss, after which line 3 ends


@dataclass(frozen=True)
class PaperOptions:
    particles: int = option(100, "K, particles of a run")
    resampling: str = option("multinomial", "resampling scheme", choices=tuple(SCHEMES))
    ess_threshold: float = option(0.0, "resample where ESS / K is lower; 1: at every step", high=1)
    effective_potential: bool = option(True, "use phi^(m), so that sigma stays the target")
    student: str = option("full", "what is fine-tuned", choices=("full", "lora"))
    objective: str = option("ctl", "what psi learns by", choices=tuple(OBJECTIVES))
    ctl_updates: int = option(100, "gradient steps for each twist")
    ctl_batch_size: int = option(100, "sequences drawn i.i.d. from q for one step")
    ctl_learning_rate: float = option(1.5e-4, "Adam's step size; falls linearly to a tenth", high=1)
    distill_runs: int = option(100, "R, TSMC runs that are distilled")
    distill_updates: int = option(200, "gradient steps for each language model, at most")
    distill_learning_rate: float = option(1e-5, "AdamW's step size; of LoRA thirty times", high=1)


def held_out_loss(model: Conditional, tokens: Tensor) -> float:
    """-log p of a token, the mean over those of texts tokens [H, T]."""
    is_counted = counted(tokens, model.end)  # [H, T] up to the end of a text; behind it log p is 0
    return (-sequence_log_probs(model, tokens).sum() / is_counted.sum()).item()


class Paper(Learner):
    """CTL and fine-tuning, with PaperOptions."""

    Options = PaperOptions

    def first_twist(self) -> Pair:
        """Line 1: psi^(0) by CTL on p^(0)."""
        return self.learn_twist(self.base, 0)

    def distil(self, pair: Pair, m: int) -> Conditional:
        """Line 3: p^(m), fine-tuned from p^(m-1) on samples of TSMC(p^(m-1), psi^(m-1))."""
        options = self.options
        given = (pair, "sampling", m, options.particles, options.distill_runs)
        # Runs whose weights are all zero have no samples.
        samples = self.population(*given).alive().samples  # [R, K, T]
        # Whole runs are held out, because the particles of one run may be copies. A run that is
        # alone is both learned and held out.
        num_held = max(1, len(samples) // HELD_OUT)
        held = samples[:num_held, ::HELD_EVERY].flatten(0, 1)  # [H, T]
        tokens = samples[num_held:].flatten(0, 1) if len(samples) > 1 else samples[0]  # [N, T]
        beginnings = len(tokens[:, :BEGINNING].unique(dim=0))
        distinct = len(tokens.unique(dim=0))
        self.record("distilled texts", m, distinct=distinct, beginnings=beginnings)
        generator = self.streams.stream("distillation", m)
        rate = options.distill_learning_rate * {"full": 1, "lora": 30}[options.student]
        # A copy that can be trained, with its optimiser.
        student = Student(pair.model.network, rate, options.student == "lora", generator)
        model = self.base.with_network(student.network)
        weights = torch.ones(len(tokens), device=tokens.device)
        batches = draw_batches(weights, BATCH_SIZE, options.distill_updates, generator)  # [U, n]
        best = Best(PATIENCE)
        best.note(student.network, held_out_loss(model, held))  # p^(m-1) may be the best
        for update, rows in enumerate(progress(batches, "distillation", m), 1):
            is_counted = counted(tokens[rows], model.end)  # [n, T]
            log_p = model.log_probs(tokens[rows])  # [n, T]
            # A mean over tokens, so that one step size suits every length T.
            loss = -log_p[is_counted].sum() / is_counted.sum()
            loss.backward()
            student.step()
            self.record("distillation", m, loss=loss.detach())
            if update % CHECKED > 0 and update < options.distill_updates:
                continue
            best.note(student.network, held_out_loss(model, held))
            if best.is_over():
                break
        best.restore()
        for loss in best.losses:
            self.record("distillation, held out", m, loss=loss)
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

    def scored(self, m: int) -> int:
        """Every text that twist learning or a distilled run has drawn."""
        options = self.options
        learning = (m + 1) * options.ctl_updates * options.ctl_batch_size
        return learning + m * options.distill_runs * options.particles
