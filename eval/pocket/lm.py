"""The pocket language model: a small GPT-Neo, trained on stories and measured on held-out ones.

    loss = mean over positions of -log p(s_t | s_{0:t-1})
    perplexity per token = exp(total NLL / tokens),   per word = exp(total NLL / words separated by white space)

Half of the training rows start where a story starts: the openings of stories are what the experiments sample.
Perplexity is over whole held-out stories and the end-of-text token behind each; a story's first token is given.

B rows of a batch, T tokens of a row, V vocabulary, N tokens of all stories, S stories.
"""

import math
from argparse import Namespace

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

import tinystories
from eval.pocket import common
from tinystories import GPTNeo, GPTNeoConfig, InputError
from tinystories.fast import accelerate
from tinystories.vocabulary import END_OF_TEXT


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


def initialise(model: GPTNeo, generator: torch.Generator) -> None:
    """Normal weights of standard deviation 0.02, zero biases."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(parameter)


def make(args: Namespace) -> None:
    """Tokenizer, stream, training, checkpoint."""
    generator = torch.Generator().manual_seed(args.seed)
    stories = common.read_stories(args.stories)
    tokenizer = common.byte_level_bpe(stories, args.vocab_size, [END_OF_TEXT])
    stream, starts = token_stream(tokenizer, stories)
    if len(stream) < args.context + 2:
        raise InputError(f"{args.stories}: shorter than one row of --context {args.context}; give more stories")
    sizes = tokenizer.get_vocab_size(), args.width, args.layers, args.heads, args.context
    kinds = tuple(("global", "local")[layer % 2] for layer in range(args.layers))
    model = GPTNeo(GPTNeoConfig(*sizes, kinds, args.window, intermediate_size=4 * args.width))
    initialise(model, generator)

    def loss_of(step: int) -> Tensor:
        rows = draw_rows(stream, starts, args.rows, args.context + 1, generator)  # [B, T + 1]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(rows[:, :-1])  # [B, T, V]
        return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    common.fit(model, args, loss_of)
    tinystories.save(args.out, model, tokenizer, torch.float16)


@torch.inference_mode()
def total_nll(model: GPTNeo, ids: list[int]) -> float:
    """-log p of all tokens but the first of one story, in nats, by windows that overlap by half."""
    size = model.config.max_position_embeddings
    stride, scored, nll = size // 2, 1, 0.0
    for start in range(0, max(1, len(ids) - stride), stride):
        window = torch.tensor(ids[start : start + size + 1])
        losses = F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="none")
        nll += losses[scored - start - 1 :].sum().item()
        scored = start + len(window)
    return nll


def write_card(args: Namespace) -> None:
    """Perplexity on the held-out stories and the first samples of a seed."""
    model, tokenizer = tinystories.load(args.out)
    accelerate(model)
    stories, heldout = common.read_stories(args.stories), common.read_stories(args.heldout)
    texts = common.sample_texts(args.out, args.samples, torch.Generator().manual_seed(args.seed))
    each = [[*row.ids, tokenizer.token_to_id(END_OF_TEXT)] for row in tokenizer.encode_batch(heldout)]
    nll = sum(total_nll(model, ids) for ids in tqdm(each, "measuring", mininterval=1))
    tokens, words = sum(len(ids) - 1 for ids in each), sum(len(story.split()) for story in heldout)
    counts = {"stories": len(stories), "heldout": len(heldout), "tokens": tokens, "words": words}
    counts["millions"] = len(token_stream(tokenizer, stories)[0]) / 1e6
    perplexities = {"per_token": math.exp(nll / tokens), "per_word": math.exp(nll / words)}
    samples = "\n".join(f"{i}. {' '.join(text.split())}" for i, text in enumerate(texts, 1))
    common.fill_card(args, model, **counts, **perplexities, samples=samples)
