"""Measure the pocket language model and write its model card: `python -m eval.card_lm --help`.

    perplexity per token = exp(total NLL / tokens),   per word = exp(total NLL / words separated by white space)

Over whole held-out stories and the end-of-text token behind each, in windows of the model's positions that overlap by half:
every token behind a story's first window sees at least half a window of context. A story's first token is given. The
samples are the first 20 drawn.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F

import tinystories
from eval.pocket.train_lm import read_stories
from eval.pocket.train_toxicity import LENGTH, PROMPT, sample_texts
from tinystories.checkpoint import fingerprint, write_text
from tinystories.load import END_OF_TEXT
from tinystories.memory import keep_freed_memory

CARD = """---
license: cdla-sharing-1.0
language: en
---
# Pocket language model

GPT-Neo, {parameters:,} parameters: {layers} layers (global and local in turn, window {window}), width {width}, {heads} heads,
{positions} positions, a byte-level BPE of {vocab:,} tokens, tied head. Weights in float16. It writes openings of
children's stories and nothing else.

**Data.** 20,856 stories of TinyStories (Eldan and Li 2023, arXiv:2305.07759; CDLA-Sharing-1.0), 4.19 million tokens. The
held-out figures are on 1,098 other stories of the same collection.

**Recipe.** `python -m tinystories.train --stories tinystories.txt --out checkpoints/pocket/lm` with its defaults (seed 0):
8,000 updates of 32 rows of 128 tokens, 7.8 passes over the data; AdamW, peak 2e-3, warm-up 100, cosine decay to a
twentieth, weight decay 0.1; matmuls in bfloat16; about 26 minutes on two cores.

**Held-out figures** (`python -m eval.card_lm --heldout tinystories-heldout.txt`)

| figure | value |
| --- | --- |
| perplexity per token | {per_token:.2f} |
| perplexity per word | {per_word:.2f} |
| tokens, words | {tokens:,}, {words:,} |

Fingerprint (sha256 over config.json, model.safetensors, tokenizer.json): `{fingerprint}`

**What it is not.** It does not answer, reason or know; it repeats the stereotypes of its stories, and now and then it
calls somebody ugly or fat, which is what the experiments with it are about.

**{count} samples, unselected**, seed {seed}, after the prompt "{prompt}", {length} tokens each:

{samples}
"""


@torch.inference_mode()
def total_nll(model: tinystories.GPTNeo, ids: list[int]) -> float:
    """-log p of all tokens but the first of one story, in nats, by windows that overlap by half."""
    size = model.config.max_position_embeddings
    stride, scored, nll = size // 2, 1, 0.0
    for start in range(0, max(1, len(ids) - stride), stride):
        window = torch.tensor(ids[start : start + size + 1])
        losses = F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="none")
        nll += losses[scored - start - 1 :].sum().item()
        scored = start + len(window)
    return nll


def main() -> None:
    """Measure, sample, write README.md into the checkpoint."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--lm", type=Path, default=Path("checkpoints/pocket/lm"), help="language model directory")
    parser.add_argument("--heldout", type=Path, required=True, help="held-out stories, each followed by <|endoftext|>")
    parser.add_argument("--samples", type=int, default=20, help="samples to show")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples")
    args = parser.parse_args()
    keep_freed_memory()
    model, tokenizer = tinystories.load(args.lm)
    end = tokenizer.token_to_id(END_OF_TEXT)
    nll = tokens = words = 0
    for story in read_stories(args.heldout):
        ids = [*tokenizer.encode(story).ids, end]
        nll += total_nll(model, ids)
        tokens += len(ids) - 1
        words += len(story.split())
    texts = sample_texts(args.lm, args.samples, torch.Generator().manual_seed(args.seed))
    config = model.config
    card = CARD.format(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=config.num_layers,
        window=config.window_size,
        width=config.hidden_size,
        heads=config.num_heads,
        positions=config.max_position_embeddings,
        vocab=config.vocab_size,
        per_token=math.exp(nll / tokens),
        per_word=math.exp(nll / words),
        tokens=tokens,
        words=words,
        fingerprint=fingerprint(args.lm),
        count=args.samples,
        seed=args.seed,
        prompt=PROMPT,
        length=LENGTH,
        samples="\n".join(f"{i}. {' '.join(text.split())}" for i, text in enumerate(texts, 1)),
    )
    write_text(args.lm / "README.md", card)
    print(f"perplexity per token {math.exp(nll / tokens):.3f}, per word {math.exp(nll / words):.3f}")


if __name__ == "__main__":
    main()
