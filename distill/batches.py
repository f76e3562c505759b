"""What self-distillation trains on: batches of samples, and samples held out to see what training does. N samples, T tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinystories.decoder import Conditional
from tsmc.scoring import sequence_log_probs


@dataclass
class Batch:
    """Samples after one prompt; of a batch that several processes share, the rows of this one."""

    tokens: Tensor  # [n, T]
    prompt: int  # which of the prompts
    batch_size: int  # of the whole batch

    def rows(self, part: slice) -> "Batch":
        """The part of one process among several."""
        return Batch(self.tokens[part], self.prompt, self.batch_size)


def hold_out(samples: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Of runs [R, K, T] after each prompt the sequences [N, T] to train on, and those of a tenth of the runs to measure."""
    cuts = [max(1, len(runs) // 10) for runs in samples]
    kept = [runs[cut:] if len(runs) > cut else runs for runs, cut in zip(samples, cuts, strict=True)]
    held_out = [runs[:cut] for runs, cut in zip(samples, cuts, strict=True)]
    return [runs.flatten(0, 1) for runs in kept], [runs.flatten(0, 1) for runs in held_out]


def batches_of(samples: Sequence[Tensor], batch_size: int, generator: torch.Generator) -> Callable[[int], Batch]:
    """Draws the batch of an update from samples [N, T] after each prompt; the prompts take turns."""

    def draw(update: int) -> Batch:
        prompt = update % len(samples)
        tokens = samples[prompt]
        chosen = torch.randint(len(tokens), (batch_size,), generator=generator, device=tokens.device)
        return Batch(tokens[chosen], prompt, batch_size)

    return draw


def held_out_loss(models: Sequence[Conditional], held_out: Sequence[Tensor]) -> float:
    """Mean of -log p(s_t | s_{0:t-1}) over sequences [N', T] of every prompt that were not trained on."""
    pairs = zip(models, held_out, strict=True)
    losses = [-sequence_log_probs(model, tokens).mean() / model.length for model, tokens in pairs]
    return torch.stack(losses).mean().item()
