"""Train the pocket language model anew: `python -m tinystories.train --stories ... --heldout ... --out checkpoints/pocket/lm`.

    loss = mean over positions of -log p(s_t | s_{0:t-1})

A byte-level BPE is trained on the stories first. A training row is a window of the token stream; half of the rows start
where a story starts, because the openings of stories are what the experiments sample. AdamW, linear warm-up, cosine decay,
matmuls in bfloat16. Prints the loss as it goes; `eval.card_lm` measures the result on held-out stories.
"""

import argparse
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from tinystories.gpt_neo import GPTNeo, GPTNeoConfig
from tinystories.load import END_OF_TEXT, save
from tinystories.memory import keep_freed_memory


def read_stories(path: Path) -> list[str]:
    """Stories of a file in which a line `<|endoftext|>` follows each."""
    return [story.strip() for story in path.read_text(encoding="utf-8").split(END_OF_TEXT) if story.strip()]


def train_tokenizer(stories: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with the end-of-text token as id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(stories, trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, stories: list[str]) -> tuple[Tensor, Tensor]:
    """All stories as one stream of tokens [N], each followed by end-of-text, and the positions where they start [S]."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    pieces = [[*encoding.ids, end] for encoding in tokenizer.encode_batch(stories)]
    starts = torch.tensor([0] + [len(piece) for piece in pieces[:-1]]).cumsum(0)
    return torch.tensor([token for piece in pieces for token in piece]), starts


def draw_rows(stream: Tensor, starts: Tensor, rows: int, width: int, generator: torch.Generator) -> Tensor:
    """Windows of the stream [rows, width]; the first half starts at story starts."""
    last = len(stream) - width
    anywhere = torch.randint(last, (rows - rows // 2,), generator=generator)
    openings = starts[torch.randint(len(starts), (rows // 2,), generator=generator)].clamp(max=last)
    offsets = torch.cat([openings, anywhere])
    return stream[offsets[:, None] + torch.arange(width)]


def learning_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """Linear warm-up to `peak`, then half a cosine down to a twentieth of it."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def initialise(model: GPTNeo, generator: torch.Generator) -> None:
    """Normal weights of standard deviation 0.02, zero biases."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(parameter)


def parse_arguments() -> argparse.Namespace:
    """Command line of this script."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--stories", type=Path, required=True, help="training stories, each followed by <|endoftext|>")
    parser.add_argument("--out", type=Path, required=True, help="directory to write the checkpoint to")
    parser.add_argument("--vocab-size", type=int, default=4096, help="tokens of the byte-level BPE")
    parser.add_argument("--width", type=int, default=192, help="hidden size")
    parser.add_argument("--layers", type=int, default=4, help="layers, global and local in turn")
    parser.add_argument("--heads", type=int, default=6, help="attention heads")
    parser.add_argument("--window", type=int, default=32, help="window of the local layers in tokens")
    parser.add_argument("--context", type=int, default=128, help="positions of a training row and of the model")
    parser.add_argument("--rows", type=int, default=32, help="rows of a batch")
    parser.add_argument("--steps", type=int, default=8000, help="updates")
    parser.add_argument("--peak", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="AdamW weight decay of matrices")
    parser.add_argument("--seed", type=int, default=0, help="seed of initialisation and batches")
    return parser.parse_args()


def main() -> None:
    """Tokenizer, stream, training loop, checkpoint."""
    args = parse_arguments()
    keep_freed_memory()
    generator = torch.Generator().manual_seed(args.seed)
    stories = read_stories(args.stories)
    tokenizer = train_tokenizer(stories, args.vocab_size)
    stream, starts = token_stream(tokenizer, stories)
    config = GPTNeoConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=args.width,
        num_layers=args.layers,
        num_heads=args.heads,
        max_position_embeddings=args.context,
        attention_layers=tuple(("global", "local")[layer % 2] for layer in range(args.layers)),
        window_size=args.window,
        intermediate_size=4 * args.width,
    )
    model = GPTNeo(config)
    initialise(model, generator)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.peak, betas=(0.9, 0.98), fused=True)
    print(
        f"{len(stories)} stories, {len(stream)} tokens, {sum(map(torch.numel, model.parameters()))} parameters",
        flush=True,
    )

    began, running = time.time(), None
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.peak, warmup=100)
        rows = draw_rows(stream, starts, args.rows, args.context + 1, generator)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(rows[:, :-1])  # [B, T, V]
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        running = loss.item() if running is None else 0.98 * running + 0.02 * loss.item()
        if step % 50 == 49 or step + 1 == args.steps:
            print(f"update {step + 1}/{args.steps}  loss {running:.4f}  {time.time() - began:.0f} s", flush=True)
        if step % 500 == 499 or step + 1 == args.steps:
            save(args.out, model, tokenizer, torch.float16)


if __name__ == "__main__":
    main()
