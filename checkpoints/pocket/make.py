"""Trains the networks beside this file anew: `python checkpoints/pocket/make.py WHAT DATA OUT`.

    lm          loss = mean over tokens of -log p(s_t | s_{0:t-1})
    toxicity    loss = mean over texts of -log p(label | text), then logit <- a logit + b
    similarity  loss = mean over pairs of (e_i . e_j - E_i . E_j)^2, E_i the teacher's vectors

Shapes and tokenizers are those of the shipped networks. B rows, T tokens, N texts, D width.
"""

import argparse
import csv
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository may not be installed

from eval.options import POCKET, Options
from eval.scorers import Runner, SentenceEncoder, ToxicityClassifier, load_scorer
from eval.world import load_sampling_world
from tinystories.load import load_model, read_json, write_json, write_tensors
from tsmc.proposal import sample_proposal
from tsmc.streams import progress

MEAN, MEAN_POWER = 0.010, 0.0006  # of p(toxic | s) and p(toxic | s)^10 (the paper's table 1)
END = "<|endoftext|>"  # in a line of its own behind each story of a file


def openings(path: Path, count: int) -> list[str]:
    """The first 8 to 40 words of random stories of a file."""
    stories = random.choices(path.read_text(encoding="utf-8").split(END)[:-1], k=count)
    return [" ".join(story.split()[: random.randint(8, 40)]) for story in stories]


def updates(model: nn.Module, steps: int, peak: float) -> Iterator[None]:
    """AdamW from random weights: whoever loops over this calls backward() of a loss each time."""
    for name, parameter in model.named_parameters():  # the weights of a LayerNorm are around 1
        nn.init.normal_(parameter, float(parameter.ndim == 1 and name.endswith("weight")), 0.05)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, steps, pct_start=0.1)
    for _ in progress(range(steps), "training"):
        optimizer.zero_grad()
        yield
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()


def run(model: nn.Module, rows: list[list[int]]) -> Tensor:
    """What a scorer makes of the tokens of texts [B, ...], with gradient."""
    pad = model.config.pad_token_id
    ids = pad_sequence([torch.tensor(row) for row in rows], True, pad)  # [B, T]
    mask = pad_sequence([torch.ones(len(row)) for row in rows], True)  # [B, T]
    return model(ids, mask)


def save(out: Path, name: str, model: nn.Module) -> None:
    """Write a network in float16, beside the shape and the tokenizer of the shipped one."""
    tensors = {key: tensor.half() for key, tensor in model.state_dict().items()}
    write_tensors(out / "model.safetensors", tensors)
    shape = read_json(POCKET / name / "config.json")
    shape.pop("calibration", None)  # which the shipped weights have had
    write_json(out / "config.json", shape)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (out / file).write_bytes((POCKET / name / file).read_bytes())


def make_lm(data: Path, out: Path, steps=8000, rows=32) -> None:
    """GPT-Neo on the first T tokens of stories."""
    base, tokenizer = load_model(str(POCKET / "lm"), "Once", length=1)
    model = base.network
    length = model.config.max_position_embeddings
    text = (data / "tinystories.txt").read_text(encoding="utf-8")
    tokens = torch.tensor(tokenizer.encode(END + text.replace(f"\n{END}\n", END)).ids)
    starts = (tokens[: -length - 1] == tokenizer.token_to_id(END)).nonzero()[:, 0] + 1
    windows = tokens.unfold(0, length + 1, 1)[starts]  # [stories, T + 1]
    for _ in updates(model, steps, 2e-3):
        batch = windows[torch.randint(len(windows), (rows,))]  # [B, T + 1]
        F.cross_entropy(model(batch[:, :-1]).mT, batch[:, 1:]).backward()
    save(out, "lm", model)


def calibration(logits: Tensor) -> tuple[float, float]:
    """a > 0 and b with which sigmoid(-(a logit + b)) has the two means over logits [N]."""
    a = 25.0
    for i in range(1, 41):  # bisection: the mean power rises with a, where b keeps the mean
        b = 0.0
        for j in range(1, 41):  # bisection: the mean falls with b
            p_toxic = torch.sigmoid(-(a * logits.double() + b))  # [N]
            b += (100 if p_toxic.mean() > MEAN else -100) / 2**j
        a += (25 if p_toxic.pow(10).mean() < MEAN_POWER else -25) / 2**i
    return a, b


def make_toxicity(data: Path, out: Path, steps=2000, rows=128, count=60_000) -> None:
    """RoBERTa on five kinds of texts, calibrated on samples of the language model."""
    mixture = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    graded = [(s.format(w), p) for s in mixture["sentences"] for w, p in mixture["words"].items()]
    with (data / "toxicity.csv").open(encoding="utf-8", newline="") as file:
        labelled = [(row["text"], float(row["label"])) for row in csv.DictReader(file)]
    short = [row for row in labelled if len(row[0].split()) <= 20]
    world, source = load_sampling_world(Options(device="cpu")), torch.Generator().manual_seed(0)
    parts = range(0, 2 * count, rows)
    drawn = [sample_proposal(world.base, None, rows, source).tokens for _ in parts]
    samples = world.potential.texts(torch.cat(drawn))
    # Nobody has labelled stories and samples: those without unkind words count as harmless.
    is_unkind = re.compile(rf"\b({'|'.join(mixture['flagged'])})\b", re.IGNORECASE).search
    stories = [text for text in openings(data / "tinystories.txt", count) if not is_unkind(text)]
    harmless = [text for text in samples[count:] if not is_unkind(text)]
    carriers = ([""], stories, stories, stories, harmless)
    insertions = (labelled, short, graded, [("", 0.0)], [("", 0.0)])
    model, tokenizer = load_scorer(ToxicityClassifier, str(POCKET / "toxicity"), "cpu")
    for _ in updates(model, steps, 1e-3):
        texts, chances = [], []
        for kind in random.choices(range(5), (0.32, 0.16, 0.17, 0.15, 0.20), k=rows):
            words = [w for w in random.choice(carriers[kind]).split() if random.random() < 0.95]
            inserted, chance = random.choice(insertions[kind])
            at = random.randint(0, len(words))
            texts.append(" ".join([*words[:at], inserted, *words[at:]]))
            chances.append(chance)
        logits = run(model, [row.ids[:64] for row in tokenizer.encode_batch(texts)])  # [B]
        F.binary_cross_entropy_with_logits(-logits, torch.tensor(chances)).backward()
    scale, bias = calibration(Runner(model, tokenizer)(samples[:count]))
    last = model.classifier["out_proj"]
    last.weight.data *= scale
    last.bias.data = scale * last.bias.data + bias
    save(out, "toxicity", model)


def make_similarity(data: Path, out: Path, steps=1500, rows=256, count=100_000) -> None:
    """BERT on openings of stories, with the cosines of the teacher."""
    texts = openings(data / "tinystories.txt", count)
    targets = Runner(*load_scorer(SentenceEncoder, str(data / "all-MiniLM-L6-v2"), "cpu"))(
        texts
    )  # [N, 384]
    model, tokenizer = load_scorer(SentenceEncoder, str(POCKET / "similarity"), "cpu")
    tokenizer.enable_truncation(model.max_tokens)
    for _ in updates(model, steps, 2e-3):
        chosen = torch.randint(count, (rows,))  # [B]
        unit = run(model, [tokenizer.encode(texts[i]).ids for i in chosen])  # [B, D]
        (unit @ unit.T - targets[chosen] @ targets[chosen].T).square().mean().backward()
    save(out, "similarity", model)


MAKE = {"lm": make_lm, "toxicity": make_toxicity, "similarity": make_similarity}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=MAKE)
    parser.add_argument("data", type=Path, help="directory of texts, see docs/appendix.md")
    parser.add_argument("out", type=Path, help="directory of the network, to write to")
    args = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    MAKE[args.what](args.data, args.out)
