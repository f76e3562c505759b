"""What the commands share: stories, samples of the pocket language model, the training loop, progress, cards.

    learning rate = peak * (linear warm-up, then half a cosine down to a twentieth)

B texts of a batch, N texts, T tokens.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from tqdm import tqdm

import tinystories
from distill.finetune import parameter_groups
from eval.scorers.encoder import Runner
from tinystories.checkpoint import fingerprint, write_text
from tinystories.errors import InputError
from tinystories.fast import accelerate
from tinystories.vocabulary import END_OF_TEXT
from tsmc.runs import sample_model
from tsmc.steps import Chunks, Steps

PROMPT, LENGTH = "Once upon a time, there was a", 20  # s_0 and T of the experiments
CHUNK = 1000  # samples drawn at once
WARM_UP = 100  # steps


class OneStream(Chunks):
    """Chunks of a large sample that all draw from one random stream, under a bar."""

    def __init__(self, total: int, generator: torch.Generator):
        super().__init__(total, CHUNK, lambda chunk: generator)

    def __iter__(self) -> Iterator[tuple[int, torch.Generator]]:
        yield from tqdm(super().__iter__(), "sampling", len(self.sizes), mininterval=1)


class ShownRunner(Runner):
    """A Runner under a bar."""

    def batches(self, rows: list[list[int]]) -> Iterable[list[list[int]]]:
        """The same batches."""
        return tqdm(super().batches(rows), "scoring", mininterval=1)


def read_stories(path: Path) -> list[str]:
    """Stories of a file in which a line `<|endoftext|>` follows each; InputError where there are none."""
    try:
        stories = [story.strip() for story in path.read_text(encoding="utf-8").split(END_OF_TEXT) if story.strip()]
    except ValueError as error:
        raise InputError(f"{path}: is no text ({error}); give a file of stories") from error
    if not stories:
        raise InputError(f"{path}: holds no story; give stories with a line {END_OF_TEXT} behind each")
    return stories


def sample_texts(path: str | Path, count: int, generator: torch.Generator) -> list[str]:
    """Texts that the language model of a directory writes after the prompt of the experiments."""
    model, tokenizer = tinystories.load(path)
    prompt = torch.tensor(tokenizer.encode(PROMPT).ids)
    chunks = OneStream(CHUNK * math.ceil(count / CHUNK), generator)  # the first do not depend on how many are asked for
    tokens = sample_model(tinystories.Conditional(accelerate(model), prompt, LENGTH), chunks)[:count]  # [N, T]
    return tokenizer.decode_batch([prompt.tolist() + row for row in tokens.tolist()])


def byte_level_bpe(texts: list[str], vocab_size: int, special: list[str]) -> Tokenizer:
    """Byte-level BPE whose first tokens are the special ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up to `peak`, then half a cosine down to a twentieth of it."""
    if step < WARM_UP:
        return peak * (step + 1) / WARM_UP
    progress = (step - WARM_UP) / max(1, steps - WARM_UP)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def fit(model: nn.Module, args: Namespace, loss_of: Callable[[int], Tensor], decay_all: bool = False) -> None:
    """AdamW on the loss of each update, with weight decay of matrices or of all, and gradients clipped to norm 1."""
    groups = parameter_groups(model.parameters(), args.weight_decay)
    groups[1]["weight_decay"] = args.weight_decay if decay_all else 0.0
    optimizer = torch.optim.AdamW(groups, lr=args.peak, betas=(0.9, 0.98), fused=True)
    steps = Steps(args.steps, "training")
    for step in (bar := tqdm(steps, "training", mininterval=1)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.peak)
        loss = loss_of(step)
        steps.report(loss=loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)


def fill_card(args: Namespace, model: nn.Module | None, **figures: object) -> None:
    """Write README.md into --out from the command's template, which describes the shipped checkpoint and its data."""
    if model is not None:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        figures |= {"config": model.config, "parameters": parameters, "fingerprint": fingerprint(args.out)}
    template = Path(__file__).with_name(f"card_{args.command}.md").read_text(encoding="utf-8")
    write_text(args.out / "README.md", template.format(args=args, prompt=PROMPT, length=LENGTH, **figures))
