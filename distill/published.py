"""The paper's learner: what lines 1, 3 and 4 of Algorithm 1 do.

    line 1   psi^(0) <- CTL on p^(0)                                                        eq. 6
    line 3   p^(m)   <- argmin_p E[-log p(s)] over samples s of TSMC(p^(m-1), psi^(m-1))    eq. 7
    line 4   psi^(m) <- CTL-m on p^(m): sigma is proportional to p^(m) phi^(m),             eq. 8
                        phi^(m) = p^(0) phi / p^(m)

psi^(m) is the MLP of `twist/mlp.py`, from psi = 1 in every generation, and p^(m) is p^(m-1) with
all parameters or LoRA fine-tuned. The samples are those of R independent runs of K particles, which
all count the same, whatever their Z-hat.

Where the default departs from the paper: a run resamples at the last token alone, because with a
poor twist earlier resampling keeps what the twist likes, not what phi will like; and what is
distilled are the particles with the weights of that last resampling, which have the expectation of
resampled ones and fewer copies. With `ess_threshold` 1 runs resample at every step and give equally
weighted samples, as published. R runs, K particles, N = R K samples, T tokens.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distill.finetune import Student
from distill.options import check_all, option
from distill.self_distill import draw_batches, self_distill
from tinystories.decoder import counted
from tsmc.interfaces import BaseModel, Report
from tsmc.resampling import SCHEMES, normalise
from tsmc.runs import Phases, draw_population
from twist.ctl import batches_from_proposal, learn_twist
from twist.mlp import TwistMLP
from twist.pair import Pair
from twist.potential import seen_from


@dataclass(frozen=True)
class PublishedOptions:
    particles: int = option(50, "K, particles of a run; 100 with --preset paper", 1)
    resampling: str = option("systematic", "resampling scheme", choices=SCHEMES)
    ess_threshold: float = option(
        0.0,
        "resample where ESS / K is lower; 0: only at the end; default .5 on the command line where "
        "the potential has a prefix part, which tells good beginnings from bad ones early",
        0,
        1,
    )
    effective_potential: bool = option(True, "use phi^(m), so that sigma stays the target")
    student: str = option("full", "what is fine-tuned", choices=("full", "lora"))
    ctl_updates: int = option(70, "gradient steps for each twist", 1)
    ctl_batch_size: int = option(100, "sequences drawn i.i.d. from q for one step", 2)
    ctl_learning_rate: float = option(3e-4, "Adam's step size; falls linearly to a tenth", 0, 1)
    ctl_hidden_units: int = option(192, "width of the twist's two hidden layers", 1)
    distill_runs: int = option(300, "R, TSMC runs that are distilled", 1)
    distill_updates: int = option(120, "gradient steps for each language model", 1)
    distill_batch_size: int = option(32, "sequences of one step", 1)
    distill_learning_rate: float = option(3e-5, "AdamW's step size for full fine-tuning", 0, 1)
    distill_lora_learning_rate: float = option(3e-4, "AdamW's step size for LoRA", 0, 1)
    distill_weight_decay: float = option(0.01, "AdamW's weight decay of matrices", 0)

    def __post_init__(self):
        check_all(self)

    def scores(self, generations: int) -> int:
        """How many texts phi has scored after so many generations: all that are drawn."""
        contrasted = (generations + 1) * self.ctl_updates * self.ctl_batch_size
        return contrasted + generations * self.distill_runs * self.particles

    def rule(self) -> dict[str, Any]:
        """How the sampler resamples: arguments of `tsmc.sampler.tsmc`."""
        return {"resample": SCHEMES[self.resampling], "ess_threshold": self.ess_threshold}


class Published:
    """Lines 1, 3 and 4 for p^(0) = base and log_phi(tokens [N, T]) -> log phi [N]."""

    def __init__(
        self,
        base: BaseModel,
        log_phi: Callable[[Tensor], Tensor],
        options: PublishedOptions,
        phases: Phases,
    ):
        self.base = base
        self.log_phi = log_phi
        self.options = options
        self.phases = phases

    def plan(self, m: int) -> dict[str, float]:
        """The phases of generation m and their work, about that of drawing so many sequences."""
        options = self.options
        learning = {"twist learning": 2.0 * options.ctl_updates * options.ctl_batch_size}
        if m == 0:
            return learning
        sampling = {"sampling": float(options.particles * options.distill_runs)}
        updates = {"distillation": 2.0 * options.distill_updates * options.distill_batch_size}
        return sampling | updates | learning

    def scores(self, generations: int) -> int:
        """How many texts phi has scored after so many generations."""
        return self.options.scores(generations)

    def line_1(self) -> Pair:
        """psi^(0) by CTL on p^(0)."""
        return self.line_4(self.base, 0)

    def line_3(self, pair: Pair, m: int) -> BaseModel:
        """p^(m), fine-tuned from p^(m-1) on samples of TSMC(p^(m-1), psi^(m-1))."""
        options = self.options
        tokens, weights = self.samples(pair, m)
        is_lora = options.student == "lora"
        rate = options.distill_lora_learning_rate if is_lora else options.distill_learning_rate

        def learn(generator: torch.Generator, report: Report) -> dict[str, Tensor]:
            network = pair.model.network
            student = Student(network, rate, options.distill_weight_decay, is_lora, generator)
            model = student.after(self.base)
            sizes = (options.distill_batch_size, options.distill_updates)
            batches = draw_batches(weights, *sizes, generator)

            def loss(rows: Tensor) -> Tensor:  # eq. 7 for each token
                log_p = model.log_probs(tokens[rows])[0]  # [n, T]
                # A mean over tokens, so that one step size suits every length T.
                return -log_p[counted(tokens[rows], model.end)].mean()

            self_distill(loss, student.optimizer, batches, report)
            return student.finish().state_dict()

        network = copy.deepcopy(pair.model.network)
        # A finished phase is read from a file, so the network is filled from its tensors.
        tensors = self.phases.once("distillation", m, options.distill_updates, learn)
        network.load_state_dict(tensors)
        return self.base.with_network(network)

    def samples(self, pair: Pair, m: int) -> tuple[Tensor, Tensor]:
        """Sequences [N, T] of the runs that did not die, and weights [N] that sum to one."""
        options = self.options
        # psi^(m-1) was learned for p^(m-1) and phi^(m-1), so the runs use this pair as well.
        sigma = seen_from(pair.model, self.base, self.log_phi, options.effective_potential)
        sizes = (options.particles, options.distill_runs)
        given = (self.phases, "sampling", m, sigma, pair.twist, *sizes)
        population = draw_population(*given, **options.rule()).alive()
        # Runs that die have no samples; the others count alike, because their Z-hat varies so much
        # with a poor twist that one run would be nearly all that is distilled.
        if options.ess_threshold == 1:
            tokens = population.samples.flatten(0, 1)  # [N, T]
            return tokens, tokens.new_full((len(tokens),), 1 / len(tokens), dtype=torch.float32)
        weights = normalise(population.log_weights) / len(population.log_z)  # [R, K]
        return population.tokens.flatten(0, 1), weights.flatten()

    def line_4(self, model: BaseModel, m: int) -> Pair:
        """p^(m) = model, and psi^(m) by CTL against the same sigma, from psi = 1."""
        options = self.options
        vocab_size, width = model.output_embeddings.shape

        def learn(generator: torch.Generator, report: Report) -> dict[str, Tensor]:
            # From psi = 1: the last twist was fitted to another p, whose states were others.
            psi = TwistMLP(width, options.ctl_hidden_units, vocab_size, generator)
            optimizer = torch.optim.Adam(psi.parameters(), lr=options.ctl_learning_rate)
            sigma = seen_from(model, self.base, self.log_phi, options.effective_potential)
            draw_batch = batches_from_proposal(sigma, psi, options.ctl_batch_size, generator)
            learn_twist(psi, optimizer, draw_batch, options.ctl_updates, report)
            return psi.state_dict()

        tensors = self.phases.once("twist learning", m, options.ctl_updates, learn)
        psi = TwistMLP.like(tensors, model)
        psi.load_state_dict(tensors)
        return Pair(model, psi.requires_grad_(False))
