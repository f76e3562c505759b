"""What the commands share: options, stories, samples of the language model, the training loop.

N texts, T tokens, P tokens of the prompt.
"""

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from tqdm import trange

import tinystories
from distill.finetune import parameter_groups
from tinystories.checkpoint import reading
from tinystories.errors import InputError
from tinystories.fast import pack
from tinystories.tokenizer import END_OF_TEXT
from tsmc import sample_proposal

PROMPT, LENGTH = "Once upon a time, there was a", 20  # s_0 and T of the experiments
CHUNK = 1000  # sequences drawn at once
WARM_UP = 100  # updates


def add_options(parser: ArgumentParser, *paths: str, **defaults: float | str | Path) -> None:
    """Options --NAME: paths that must be given, and values with the defaults of the shipped."""
    for name in paths:
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name, default in defaults.items():
        kind = Path if isinstance(default, Path) else type(default)
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, default=default, help=f"default: {default}")


def read_stories(path: Path) -> list[str]:
    """Stories of a file in which a line `<|endoftext|>` follows each one."""
    with reading(path, "is not a file of stories", f"give a line {END_OF_TEXT} after each story"):
        parts = path.read_text(encoding="utf-8").split(END_OF_TEXT)
        stories = [part.strip() for part in parts if part.strip()]
        if not stories:
            raise ValueError("it has no text")
        return stories


def sample_texts(path: Path, count: int, generator: torch.Generator) -> list[str]:
    """Texts that the language model of a directory writes after the prompt of the experiments.

    Whole chunks are drawn, so that the first texts do not depend on how many are asked for.
    """
    model, tokenizer = tinystories.load(path)
    prompt = tokenizer.encode(PROMPT).ids  # [P]
    conditional = tinystories.Conditional(pack(model), torch.tensor(prompt), LENGTH)
    chunks = trange(0, count, CHUNK, desc="sampling")
    tokens = [sample_proposal(conditional, None, CHUNK, generator).tokens for _ in chunks]
    rows = torch.cat(tokens)[:count].tolist()  # [N, T]
    return tokenizer.decode_batch([prompt + row for row in rows])


def byte_level_bpe(texts: list[str], vocab_size: int, special: list[str]) -> Tokenizer:
    """A byte-level BPE whose first tokens are the special ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special)
    trainer.initial_alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up to `peak`, then half a cosine down to a twentieth of it."""
    if step < WARM_UP:
        return peak * (step + 1) / WARM_UP
    progress = (step - WARM_UP) / max(1, steps - WARM_UP)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def fit(
    model: nn.Module, args: Namespace, loss_of: Callable[[int], Tensor], decay_all: bool = False
) -> None:
    """AdamW with gradients clipped to norm 1; weight decay of matrices, or of all parameters."""
    groups = parameter_groups(model.parameters(), args.weight_decay)
    groups[1]["weight_decay"] = args.weight_decay if decay_all else 0.0
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
    for step in trange(args.steps, desc="training", mininterval=1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.peak)
        loss = loss_of(step)
        if not loss.isfinite():
            raise InputError(f"update {step}: the loss is {loss.item()}; lower --peak")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
