"""Self-distillation: the next generation's language model from the last one's samples (paper eq. 7).

    p^(m) = argmin_p  E_{s ~ TSMC(p^(m-1), psi^(m-1))} [ -log p(s_{1:T} | s_0) ],   started at p^(m-1)

The samples come from many independent runs, because the particles of one run share ancestors: a run's K final particles
hold far fewer distinct sequences. Few passes with a small learning rate keep the model from learning them by heart; the
loss on samples of runs that were held out, reported beside the training loss, shows it. Weight decay spares biases and
LayerNorm. N samples, T tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distill.finetune import Student
from eval.run import processes as ranks
from tinystories.decoder import Conditional
from tinystories.errors import InputError
from tinystories.gpt_neo import GPTNeo
from tsmc.proposal import sequence_log_probs
from tsmc.steps import Phase


@dataclass(frozen=True)
class DistillConfig:
    """Self-distillation."""

    runs: int = field(
        default=300,
        metadata={"help": "independent TSMC runs whose samples are distilled; a tenth is held out", "at_least": 2},
    )
    updates: int = field(default=80, metadata={"help": "gradient steps", "at_least": 1})
    batch_size: int = field(default=128, metadata={"help": "sequences of one step", "at_least": 1})
    learning_rate: float = field(
        default=3e-5, metadata={"help": "AdamW's step size for full fine-tuning", "at_least": 0, "at_most": 1}
    )
    lora_learning_rate: float = field(
        default=3e-4, metadata={"help": "AdamW's step size with --lora", "at_least": 0, "at_most": 1}
    )
    weight_decay: float = field(default=0.01, metadata={"help": "AdamW's weight decay of matrices", "at_least": 0})

    def step_size(self, lora: bool) -> float:
        """AdamW's step size for what is trained."""
        return self.lora_learning_rate if lora else self.learning_rate

    def flag(self, lora: bool) -> str:
        """The option that sets it."""
        return "--distill-lora-learning-rate" if lora else "--distill-learning-rate"


def negative_log_likelihood(model: Conditional, tokens: Tensor, batch_size: int) -> Tensor:
    """-log p(s_t | s_{0:t-1}) summed over sequences [N, T] and divided by batch_size T, a scalar with gradient.

    For a whole batch, N = batch_size, it is the mean; the parts of several processes sum to that.
    """
    return -model.log_probs(tokens)[0].sum() / (batch_size * model.length)


def held_out_loss(models: Sequence[Conditional], held_out: Sequence[Tensor]) -> float:
    """Mean of -log p(s_t | s_{0:t-1}) over sequences [N', T] of every prompt that were not trained on."""
    losses = [
        -sequence_log_probs(model, tokens).mean() / model.length for model, tokens in zip(models, held_out, strict=True)
    ]
    return torch.stack(losses).mean().item()


def self_distill(
    models: Sequence[Conditional],
    samples: Sequence[Tensor],
    held_out: Sequence[Tensor],
    config: DistillConfig,
    lora: bool,
    generator: torch.Generator,
    phase: Phase,
) -> GPTNeo:
    """p^(m) from p^(m-1) (left unchanged), given after each prompt, and its samples [N, T] after each prompt.

    Prompts take turns. held_out [N', T] is only measured. Training is in float32, rounded to the type of p^(m-1) at the end.
    Reports loss= of every step and notes held_out_before= and held_out_after=. InputError, before the step is taken, where the
    loss is not finite.
    """
    student = Student(models[0], config.step_size(lora), config.weight_decay, lora, generator)
    students = [Conditional(student.network, model.prompt, model.length) for model in models]
    mine = ranks.share(config.batch_size)
    state = {"student": student.network, "optimizer": student.optimizer, "generator": generator}
    for update in phase.steps(config.updates, **state):
        model, tokens = students[update % len(students)], samples[update % len(students)]
        chosen = torch.randint(len(tokens), (config.batch_size,), generator=generator, device=tokens.device)[mine]
        loss = negative_log_likelihood(model, tokens[chosen], config.batch_size)
        whole = ranks.total(loss.detach()).item()
        if not math.isfinite(whole):
            raise InputError(f"distillation, update {update + 1}: the loss is not finite; lower {config.flag(lora)}")
        student.optimizer.zero_grad()
        loss.backward()
        ranks.add_gradients(student.parameters)
        student.optimizer.step()
        phase.report(loss=whole)
    student.finish("distillation", f"lower {config.flag(lora)}")
    phase.note(held_out_before=held_out_loss(models, held_out), held_out_after=held_out_loss(students, held_out))
    return student.network.to(models[0].model.wte.weight.dtype)
