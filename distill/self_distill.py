"""Self-distillation: the next generation's language model from the last one's samples (paper eq. 7).

    p^(m) = argmin_p  E_{s ~ TSMC(p^(m-1), psi^(m-1))} [ -log p(s_{1:T} | s_0) ],   started at p^(m-1)

The samples come from many independent runs, because the particles of one run share ancestors: a run's K final particles
hold far fewer distinct sequences. Few passes with a small learning rate keep the model from learning them by heart; the
loss on samples of runs that were held out, reported beside the training loss, shows it. Weight decay spares biases and
LayerNorm. N samples, T tokens.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from distill.lora import add_lora, merge_lora
from tinystories.decoder import Conditional
from tinystories.errors import InputError
from tinystories.gpt_neo import GPTNeo
from tsmc.proposal import sequence_log_probs


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


def parameter_groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict]:
    """AdamW groups: decay for matrices, none for biases and LayerNorm."""
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def negative_log_likelihood(model: Conditional, tokens: Tensor) -> Tensor:
    """Mean over sequences [N, T] and positions of -log p(s_t | s_{0:t-1}), a scalar with gradient."""
    return -model.log_probs(tokens)[0].mean()


def self_distill(
    model: Conditional,
    samples: Tensor,
    held_out: Tensor,
    config: DistillConfig,
    lora: bool,
    generator: torch.Generator,
    report: Callable[..., None],
) -> Conditional:
    """p^(m) from p^(m-1) = model (left unchanged) and samples [N, T]; held_out [N', T] are only measured.

    Calls report(update, loss=) after each step, the last time with held_out_before= and held_out_after= as well.
    """
    student: GPTNeo = copy.deepcopy(model.model)
    parameters = add_lora(student, generator) if lora else list(student.parameters())
    learning_rate = config.lora_learning_rate if lora else config.learning_rate
    flag = "--distill-lora-learning-rate" if lora else "--distill-learning-rate"
    optimizer = torch.optim.AdamW(parameter_groups(parameters, config.weight_decay), lr=learning_rate)
    distilled = Conditional(student, model.prompt, model.length)
    before = -sequence_log_probs(distilled, held_out).mean().item() / model.length
    for update in range(config.updates):
        chosen = torch.randint(len(samples), (config.batch_size,), generator=generator, device=samples.device)
        loss = negative_log_likelihood(distilled, samples[chosen])
        if not torch.isfinite(loss):
            raise InputError(f"distillation, update {update + 1}: the loss is not finite; lower {flag}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if update + 1 < config.updates:
            report(update + 1, loss=loss.item())
    if lora:
        merge_lora(student)
    after = -sequence_log_probs(distilled, held_out).mean().item() / model.length
    if not math.isfinite(after):
        raise InputError(f"distillation: the distilled model is not finite; lower {flag}")
    report(config.updates, loss=loss.item(), held_out_before=before, held_out_after=after)
    return distilled
