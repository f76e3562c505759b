"""The pocket language model: a small GPT-Neo, trained on stories and measured on held-out ones.

    loss = mean over positions of -log p(s_t | s_{0:t-1})
    perplexity per token = exp(total NLL / tokens),   per word = exp(total NLL / words)

The stories, the samples and the training loop, `fit`, serve the other two networks as well. B rows,
T tokens of a row, V vocabulary, N tokens of all stories or texts, S stories, P prompt.
"""

import math
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import ByteLevelBPETokenizer, Encoding, Tokenizer
from torch import Generator, Tensor, nn
from tqdm import trange

import tinystories
from distill.finetune import parameter_groups
from tinystories import GPTNeo, GPTNeoConfig, InputError
from tinystories.checkpoint import reading
from tinystories.tokenizer import END_OF_TEXT
from tsmc import sample_proposal

PROMPT, LENGTH = "Once upon a time, there was a", 20  # s_0 and T of the experiments
CHUNK = 1000  # sequences drawn at once
WARM_UP = 100  # updates


def read_stories(path: Path) -> list[str]:
    """Stories of a file in which a line `<|endoftext|>` follows each one."""
    with reading(path, "is not a file of stories", f"give a line {END_OF_TEXT} after each story"):
        parts = path.read_text(encoding="utf-8").split(END_OF_TEXT)
        stories = [part.strip() for part in parts if part.strip()]
        if not stories:
            raise ValueError("it has no text")
        return stories


def sample_texts(path: Path, count: int, generator: Generator) -> list[str]:
    """Texts that the language model of a directory writes after the prompt of the experiments."""
    model, tokenizer = tinystories.load(path)
    prompt = tokenizer.encode(PROMPT).ids  # [P]
    conditional = tinystories.Conditional(model, torch.tensor(prompt), LENGTH)
    chunks = trange(0, count, CHUNK, desc="sampling")
    tokens = [sample_proposal(conditional, None, CHUNK, generator).tokens for _ in chunks]
    rows = torch.cat(tokens)[:count].tolist()  # [N, T]
    return tokenizer.decode_batch([prompt + row for row in rows])


def byte_level_bpe(texts: list[str], vocab_size: int, special: list[str]) -> Tokenizer:
    """A byte-level BPE whose first tokens are the special ones; it adds nothing to a text."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocab_size, min_frequency=0, special_tokens=special)
    tokenizer = Tokenizer.from_str(trained.to_str())
    tokenizer.post_processor = None
    return tokenizer


def fit(
    model: nn.Module, args: Namespace, loss_of: Callable[[int], Tensor], decay_all: bool = False
) -> None:
    """AdamW with gradients clipped to norm 1; weight decay of matrices, or of all parameters."""
    groups = parameter_groups(model.parameters(), args.weight_decay)
    groups[1]["weight_decay"] = args.weight_decay if decay_all else 0.0
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
    for step in trange(args.steps, desc="training", mininterval=1):
        # The rate rises linearly to --peak, then falls by half a cosine to a twentieth of it.
        progress = max(0, step - WARM_UP) / max(1, args.steps - WARM_UP)
        falling = args.peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = min(args.peak * (step + 1) / WARM_UP, falling)
        loss = loss_of(step)
        if not loss.isfinite():
            raise InputError(f"update {step}: the loss is {loss.item()}; lower --peak")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def train(model: GPTNeo, stories: list[Encoding], args: Namespace, generator: Generator) -> None:
    """Fit the model to windows of the joined stories, half of which start where a story starts."""
    stream = torch.tensor([token for story in stories for token in story.ids])  # [N]
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

    fit(model, args, loss_of)


@torch.inference_mode()
def total_nll(model: GPTNeo, ids: list[int]) -> float:
    """-log p of all tokens of a story but the first, by windows that overlap by half."""
    half, nll = model.config.max_position_embeddings // 2, 0.0
    for start in range(0, max(1, len(ids) - half), half):
        window = torch.tensor(ids[start : start + 2 * half + 1])
        losses = F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="none")
        nll += losses[half if start else 0 :].sum().item()
    return nll


def make(args: Namespace, generator: Generator) -> dict:
    """Write the checkpoint and return its perplexities on whole held-out stories."""
    stories, heldout = read_stories(args.stories), read_stories(args.heldout)
    tokenizer = byte_level_bpe(stories, args.vocab_size, [END_OF_TEXT])
    kinds = tuple(("global", "local")[layer % 2] for layer in range(args.layers))
    sizes = (tokenizer.get_vocab_size(), args.width, args.layers, args.heads, args.context)
    model = GPTNeo(GPTNeoConfig(*sizes, kinds, args.window, 4 * args.width))
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    seen = tokenizer.encode_batch([story + END_OF_TEXT for story in stories])
    train(model, seen, args, generator)
    tinystories.save(args.out, model, tokenizer, torch.float16)
    model, _ = tinystories.load(args.out)
    unseen = tokenizer.encode_batch([story + END_OF_TEXT for story in heldout])
    nll = sum(total_nll(model, story.ids) for story in unseen)
    return {
        "perplexity_per_token": math.exp(nll / sum(len(story) - 1 for story in unseen)),
        "perplexity_per_word": math.exp(nll / sum(len(story.split()) for story in heldout)),
    }
