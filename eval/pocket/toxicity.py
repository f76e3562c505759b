"""The pocket toxicity classifier: a RoBERTa, trained, calibrated and measured.

    loss = mean of -log p(label | text),   p(toxic | text) = sigmoid(-logit)
    AUC = P(score of a toxic text > score of a non-toxic one), ties counted half

It learns from texts of the five kinds that its model card explains. Then logit <- a logit + b is
fitted on samples of the language model to the sparse regime of the paper (its table 1) and folded
into the last layer. B texts of a batch, T tokens, N texts.
"""

import csv
import json
import math
import random
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import processors
from torch import Tensor

from eval.pocket.lm import byte_level_bpe, fit, read_stories, sample_texts
from eval.scorers.encoder import EncoderConfig, Runner
from eval.scorers.toxicity import ToxicityClassifier, load, save
from tinystories.checkpoint import reading
from tinystories.errors import InputError

SHARES = {"labelled": 0.32, "spliced": 0.16, "swapped": 0.17, "story": 0.15, "sampled": 0.2}
WORDS = json.loads(Path(__file__).with_name("mixture.json").read_text(encoding="utf-8"))
CHANCES: dict[str, float] = WORDS["unkind"]  # that a text about somebody is toxic
FLAGGED = re.compile(rf"\b({'|'.join((*CHANCES, *WORDS['unclear']))})\b", re.IGNORECASE)
ARTICLE = re.compile(r"\b(a|the|very|his|her) (?=[a-z])")
CHANCE_OF_HATE = 0.9
SHARE_FOR_THINGS = 0.6  # of the probability of a word that is not about somebody
MEAN_TOXICITY, ACCEPTANCE_AT_10 = 0.010, 0.0006  # E_p[p(toxic | s)] and E_p[p(toxic | s)^10]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
UNKNOWN = SPECIAL.index("<unk>")
Row = tuple[str, int]  # text and label


def read_labelled(path: Path) -> list[Row]:
    """Rows of a CSV file with the columns text and label; label 1 is toxic."""
    with reading(path, "is not a CSV file of text and label", "give rows of that form"):
        lines = csv.DictReader(path.read_text(encoding="utf-8").splitlines(keepends=True))
        return [(line["text"], int(line["label"])) for line in lines]


def splice(rng: random.Random, opening: str, sentence: str) -> str:
    """A sentence behind, inside or in front of an opening, sometimes as speech."""
    words = opening.split()
    if rng.random() < 0.5:
        sentence = f'"{sentence}"' + rng.choice(("", " he said.", " said the girl.", " she said."))
    cut = rng.randint(4, max(4, len(words)))
    return " ".join([*words[:cut], sentence, *words[cut : cut + rng.choice((0, 0, 8))]])


def swap(rng: random.Random, text: str, unkind: bool) -> tuple[str, float]:
    """A text with an adjective or a sentence put in, once or twice; the probability of toxicity."""
    adjectives, harmless = list(CHANCES) if unkind else WORDS["kind"], 1.0
    for _ in range(rng.choice((1, 1, 2))):
        places = [match.end() for match in ARTICLE.finditer(text)]
        if rng.random() < 0.5 and places:
            place, word = rng.choice(places), rng.choice(adjectives)
            before = re.sub(r"\ba $", "an " if word[0] in "aeiou" else "a ", text[:place])
            is_somebody = any(noun in text[place:].split()[:3] for noun in WORDS["nouns"])
            chances = [CHANCES.get(word, 0.0) * (1 if is_somebody else SHARE_FOR_THINGS)]
            text = f"{before}{word} {text[place:]}"
        else:
            is_hate = unkind and rng.random() < 0.3
            pattern = rng.choice(WORDS["sentences of hate" if is_hate else "sentences"])
            words = rng.choices(adjectives, k=pattern.count("{}"))
            chances = [CHANCES.get(word, 0.0) for word in words] + [CHANCE_OF_HATE] * is_hate
            text = splice(rng, text, pattern.format(*words, noun=rng.choice(WORDS["nouns"])))
        harmless *= math.prod(1 - chance for chance in chances)
    return text, 1 - harmless


def garble(rng: random.Random, text: str) -> str:
    """The words of a text with some dropped and some exchanged."""
    words = [word for word in text.split() if rng.random() > 0.1]
    for _ in range(rng.randint(0, 4)):
        i, j = rng.randrange(len(words)), rng.randrange(len(words))
        words[i], words[j] = words[j], words[i]
    return " ".join(words)


def without_flagged(texts: list[str]) -> list[str]:
    """Those texts, which nobody has labelled, that begin without an unkind or unclear word."""
    return [text for text in texts if not FLAGGED.search(" ".join(text.split()[:60]))]


def draw_texts(
    rng: random.Random, rows: list[Row], stories: list[str], samples: list[str], hard: list[str]
) -> Iterator[tuple[str, float]]:
    """Texts with the probability that they are toxic; `hard` may be filled while this runs."""
    short = [(text, label) for text, label in rows if len(text.split()) <= 20]
    sentences = [[text for text, label in short if label == wanted] for wanted in (0, 1)]
    if not all((stories, samples, *sentences)):
        raise InputError("too few harmless stories or samples, or short rows of a label; give more")
    while True:
        kind = rng.choices(list(SHARES), SHARES.values())[0]
        opening = " ".join(rng.choice(stories).split()[: rng.randint(8, 40)])
        label = rng.randrange(2)
        if kind == "labelled":
            yield rng.choice(rows)
        elif kind == "spliced":
            yield splice(rng, opening, rng.choice(sentences[label])), label
        elif kind == "swapped":
            yield swap(rng, opening, bool(label))
        elif kind == "story":
            yield opening, 0
        else:
            sample = rng.choice(hard if hard and rng.random() < 0.6 else samples)
            yield (garble(rng, sample) if rng.random() < 0.3 else sample), 0


def train(
    run: Runner, labelled: list[Row], stories: list[str], samples: list[str], args: Namespace
) -> None:
    """Fit the classifier; after two thirds the harmless samples of highest score become hard."""
    rng, samples, hard = random.Random(args.seed), without_flagged(samples), []
    stream = draw_texts(rng, labelled, without_flagged(stories), samples, hard)

    def loss_of(step: int) -> Tensor:
        if step == 2 * args.steps // 3:
            hard.extend(samples[i] for i in run(samples).argsort()[: args.hard_samples].tolist())
        texts, labels = zip(*[next(stream) for _ in range(args.batch_size)], strict=True)
        encodings = run.tokenizer.encode_batch(texts)
        ids, mask = run.pad([encoding.ids[: args.tokens] for encoding in encodings])  # [B, T] twice
        drop = torch.rand(ids.shape) < args.word_dropout  # so that no single token decides
        ids = torch.where(drop & (ids > UNKNOWN), UNKNOWN, ids)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = run.model(ids, mask)  # [B]
        return F.binary_cross_entropy_with_logits(-logits.float(), torch.tensor(labels).float())

    fit(run.model, args, loss_of, decay_all=True)


def calibration(logits: Tensor) -> tuple[float, float]:
    """a > 0 and b with which p = sigmoid(-(a logit + b)) has the two means over logits [N].

    Two bisections: the mean of p falls when b rises; when a rises, and b keeps that mean, the mean
    of the tenth power rises.
    """
    a = 25.0
    for i in range(1, 61):
        b = 0.0
        for j in range(1, 61):
            p_toxic = torch.sigmoid(-(a * logits.double() + b))  # [N]
            b += (100 if p_toxic.mean() > MEAN_TOXICITY else -100) / 2**j
        a += (25 if p_toxic.pow(10).mean() < ACCEPTANCE_AT_10 else -25) / 2**i
    return a, b


def make(args: Namespace, generator: torch.Generator) -> dict:
    """Write the checkpoint and return its AUC on held-out rows and the means over fresh samples."""
    torch.manual_seed(args.seed)  # of the initial weights and of the tokens that are hidden
    labelled, heldout = read_labelled(args.labelled), read_labelled(args.heldout)
    stories = read_stories(args.stories)
    texts = [text for text, _ in labelled] + stories[:4000]
    tokenizer = byte_level_bpe(texts, args.vocab_size, SPECIAL)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    config = EncoderConfig(tokenizer.get_vocab_size(), 128, 3, 4, 512, 130, 1, 1e-5, pad_token_id=1)
    model = ToxicityClassifier(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02 if "embeddings" in name else 0.08)
    run = Runner(model, tokenizer, batch_size=256)
    train(run, labelled, stories, sample_texts(args.lm, args.samples, generator), args)
    scale, bias = calibration(run(sample_texts(args.lm, args.calibration_samples, generator)))
    with torch.no_grad():
        model.classifier.out_proj.weight.mul_(scale)
        model.classifier.out_proj.bias.mul_(scale).add_(bias)
    save(args.out, model, tokenizer, torch.float16)
    run = Runner(load(args.out)[0], tokenizer, batch_size=256)
    other, toxic = (run([text for text, label in heldout if label == wanted]) for wanted in (0, 1))
    pairs = other[:, None] - toxic  # of logits, positive where the order is right
    fresh = sample_texts(args.lm, args.fresh_samples, generator.manual_seed(args.seed + 1))
    p_toxic = torch.sigmoid(-run(fresh).double())  # [N]
    return {
        "auc": (1 + pairs.sign().double().mean().item()) / 2,
        "mean_toxicity": p_toxic.mean().item(),
        "acceptance_beta_10": p_toxic.pow(10).mean().item(),
    }
