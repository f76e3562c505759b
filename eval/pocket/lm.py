"""The pocket language model: a small GPT-Neo, trained on stories and measured on held-out ones.

    loss = mean over positions of -log p(s_t | s_{0:t-1})
    perplexity per token = exp(total NLL / tokens),   per word = exp(total NLL / words)

Every second layer attends to the last --window tokens; --context is the length of training rows.
B rows, T tokens of a row, V vocabulary, N tokens of all stories, S stories.
"""

import math
from argparse import ArgumentParser, Namespace

import torch
import torch.nn.functional as F
from torch import Tensor

import tinystories
from eval.pocket import common
from tinystories import GPTNeo, GPTNeoConfig, InputError
from tinystories.tokenizer import END_OF_TEXT


def add_options(parser: ArgumentParser) -> None:
    add = common.add_options
    add(parser, "stories", "heldout", "out", seed=0)
    add(parser, vocab_size=4096, width=192, layers=4, heads=6, window=32, context=128)
    add(parser, rows=32, steps=8000, peak=2e-3, weight_decay=0.1)


def initialise(model: GPTNeo, generator: torch.Generator) -> None:
    """Normal weights of standard deviation 0.02, zero biases."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(parameter)


def train(
    model: GPTNeo, stories: list[list[int]], args: Namespace, generator: torch.Generator
) -> None:
    """Fit the model to windows of the joined stories.

    Half of the windows start where a story starts: the experiments sample openings of stories.
    """
    stream = torch.tensor([token for story in stories for token in story])  # [N]
    starts = torch.tensor([0] + [len(story) for story in stories[:-1]]).cumsum(0)  # [S]
    last, half = len(stream) - args.context - 1, args.rows // 2
    if last < 1:
        raise InputError(f"{args.stories}: too short for --context {args.context}; give more")

    def loss_of(step: int) -> Tensor:
        anywhere = torch.randint(last, (args.rows - half,), generator=generator)
        openings = starts[torch.randint(len(starts), (half,), generator=generator)]
        offsets = torch.cat([openings.clamp(max=last), anywhere])  # [B]
        rows = stream[offsets[:, None] + torch.arange(args.context + 1)]  # [B, T + 1]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(rows[:, :-1])  # [B, T, V]
        return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    common.fit(model, args, loss_of)


@torch.inference_mode()
def total_nll(model: GPTNeo, ids: list[int]) -> float:
    """-log p of all tokens of a story but the first, by windows that overlap by half."""
    size = model.config.max_position_embeddings
    stride = size // 2
    scored, nll = 1, 0.0
    for start in range(0, max(1, len(ids) - stride), stride):
        window = torch.tensor(ids[start : start + size + 1])
        losses = F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="none")
        nll += losses[scored - start - 1 :].sum().item()
        scored = start + len(window)
    return nll


def make(args: Namespace) -> dict:
    """Write the checkpoint; its perplexities on whole held-out stories."""
    generator = torch.Generator().manual_seed(args.seed)
    stories, heldout = common.read_stories(args.stories), common.read_stories(args.heldout)
    tokenizer = common.byte_level_bpe(stories, args.vocab_size, [END_OF_TEXT])
    seen, unseen = (
        [tokenizer.encode(story + END_OF_TEXT).ids for story in texts] for texts in (stories, heldout)
    )
    vocab_size, inner = tokenizer.get_vocab_size(), 4 * args.width
    kinds = tuple(("global", "local")[layer % 2] for layer in range(args.layers))
    config = GPTNeoConfig(
        vocab_size, args.width, args.layers, args.heads, args.context, kinds, args.window, inner
    )
    model = GPTNeo(config)
    initialise(model, generator)
    train(model, seen, args, generator)
    tinystories.save(args.out, model, tokenizer, torch.float16)
    model, _ = tinystories.load(args.out)
    nll = sum(total_nll(model, ids) for ids in unseen)
    tokens, words = sum(len(ids) - 1 for ids in unseen), len(" ".join(heldout).split())
    return {
        "perplexity_per_token": math.exp(nll / tokens),
        "perplexity_per_word": math.exp(nll / words),
    }
