"""The pocket toxicity classifier: trained, calibrated and measured.

    loss = mean of -log p(label | text),   p(toxic | text) = sigmoid(-logit)

A RoBERTa of 3 layers and width 128 with a byte-level BPE of its own, trained on the texts of `mixture.py`. Then a temperature
and a bias, logit <- a logit + b, are chosen on samples of the pocket language model so that
    E_p[p(toxic | s)] = 0.010   and   E_p[p(toxic | s)^10] = 0.0006,
the paper's sparse regime (its table 1), and folded into the last layer. Neither changes the order of any two texts.

    AUC = P(score of a toxic text > score of a non-toxic one), ties counted half          per source, held-out rows
    E_p[p(toxic | s)^beta]                                                 over fresh samples of the pocket language model

Calibration moves the threshold between toxic and non-toxic far up, because almost no story is toxic. So accuracy is given
at the threshold that training aimed at (0.5 before calibration), which `config.json` remembers.

B texts of a batch, T tokens of a text, N texts that are scored.
"""

import argparse
import math
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import processors
from torch import Tensor

from eval.pocket import common
from eval.pocket.mixture import Labelled, Mixture, read_labelled
from eval.scorers import toxicity
from eval.scorers.encoder import EncoderConfig, Runner
from tinystories.checkpoint import fingerprint, read_json, write_json

MEAN_TOXICITY, ACCEPTANCE_AT_10 = 0.010, 0.0006
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]  # tokens 0 to 3

FILES = ("labelled", "stories", "heldout")
DEFAULTS = {"lm": Path("checkpoints/pocket/lm"), "vocab_size": 5000, "tokens": 64, "word_dropout": 0.03}
DEFAULTS |= {"batch_size": 128, "steps": 2000, "peak": 1e-3, "weight_decay": 0.05}
DEFAULTS |= {"samples": 60_000, "hard_samples": 2000, "calibration_samples": 100_000, "fresh_samples": 200_000}


def calibration(logits: Tensor) -> tuple[float, float]:
    """a > 0 and b that give sigmoid(-(a logit + b)) the two means, by bisection of b inside bisection of log a."""
    logits = logits.double()

    def bias_for(scale: float) -> float:
        """The b that gives the mean toxicity at this a."""
        low, high = -100.0, 100.0
        for _ in range(60):
            middle = (low + high) / 2
            too_toxic = torch.sigmoid(-(scale * logits + middle)).mean() > MEAN_TOXICITY
            low, high = (middle, high) if too_toxic else (low, middle)
        return (low + high) / 2

    low, high = 0.05, 50.0  # a larger scale is more decisive: the same mean, a larger mean of the tenth power
    for _ in range(50):
        scale = (low * high) ** 0.5
        tenth = torch.sigmoid(-(scale * logits + bias_for(scale))).pow(10).mean()
        low, high = (low, scale) if tenth > ACCEPTANCE_AT_10 else (scale, high)
    return scale, bias_for(scale)


def train(run: Runner, texts: Mixture, args: argparse.Namespace) -> None:
    """Fit the classifier of `run`; after two thirds the harmless samples that it scores as most toxic are mined once."""
    stream = texts.draw(random.Random(args.seed))

    def loss_of(step: int) -> Tensor:
        if step == 2 * args.steps // 3:
            samples = texts.harmless_samples()
            texts.hard.extend(samples[i] for i in run(samples).argsort()[: args.hard_samples].tolist())
        batch = [next(stream) for _ in range(args.batch_size)]
        encoded = run.tokenizer.encode_batch([text for text, _ in batch])
        ids, mask = run.pad([encoding.ids[: args.tokens] for encoding in encoded])  # [B, T] twice
        labels = torch.tensor([label for _, label in batch], dtype=torch.float32)  # [B]
        drop = torch.rand(ids.shape) < args.word_dropout  # hides tokens, so that no single one decides
        unknown = SPECIAL.index("<unk>")
        ids = torch.where(drop & (ids > unknown), unknown, ids)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = run.model(ids, mask)  # [B]
        return F.binary_cross_entropy_with_logits(-logits.float(), labels)

    common.fit(run.model, args, loss_of, vector_decay=args.weight_decay)


def make(args: argparse.Namespace) -> None:
    """Tokenizer, training, calibration, checkpoint."""
    torch.manual_seed(args.seed)  # of the initial weights and of the tokens that are hidden
    generator = torch.Generator().manual_seed(args.seed)
    labelled, stories = read_labelled(args.labelled), common.read_stories(args.stories)
    texts = [row.text for row in labelled] + stories[:4000]
    tokenizer = common.byte_level_bpe(texts, args.vocab_size, SPECIAL)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    config = EncoderConfig(tokenizer.get_vocab_size(), 128, 3, 4, 512, 130, 1, layer_norm_eps=1e-5, pad_token_id=1)
    model = toxicity.ToxicityClassifier(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02 if "embeddings" in name else 0.08)
    run = Runner(model, tokenizer, batch_size=256)
    train(run, Mixture(labelled, stories, common.sample_texts(args.lm, args.samples, generator)), args)
    samples = common.sample_texts(args.lm, args.calibration_samples, generator)
    with common.scoring(model.eval(), len(samples), "calibrating"):
        scale, bias = calibration(run(samples))
    with torch.no_grad():
        model.classifier.out_proj.weight.mul_(scale)
        model.classifier.out_proj.bias.mul_(scale).add_(bias)
    toxicity.save(args.out, model, tokenizer, torch.float16)
    fields = read_json(args.out / "config.json")
    write_json(args.out / "config.json", fields | {"calibration": {"scale": scale, "bias": bias}})


def area_under_curve(scores: Tensor, labels: Tensor) -> float:
    """AUC of scores [N] for labels [N] (1 = positive); NaN where a label is missing."""
    positive, negative = scores[labels == 1], scores[labels == 0].sort().values
    if len(positive) == 0 or len(negative) == 0:
        return math.nan
    below = torch.searchsorted(negative, positive).double() + torch.searchsorted(negative, positive, right=True)
    return (below.mean() / 2 / len(negative)).item()


def source_table(scores: Tensor, rows: list[Labelled], threshold: float) -> str:
    """Markdown lines: AUC and accuracy of scores [N], the larger the more toxic, of each source and of all."""
    labels, lines = torch.tensor([row.label for row in rows]), []
    for name in [*sorted({row.source for row in rows}), "all"]:
        chosen = torch.tensor([name in ("all", row.source) for row in rows])
        auc = area_under_curve(scores[chosen], labels[chosen])
        right = ((scores[chosen] > threshold).long() == labels[chosen]).double().mean().item()
        figures = f"{int(labels[chosen].sum())} | {'-' if math.isnan(auc) else f'{auc:.3f}'} | {right:.3f}"
        lines.append(f"| {name} | {int(chosen.sum())} | {figures} |")
    return "\n".join(lines)


def write_card(args: argparse.Namespace) -> None:
    """AUC and accuracy on held-out rows, and the regime over samples that the calibration has not seen."""
    scorer = toxicity.ToxicityScorer(*toxicity.load(args.out), batch_size=256)
    calibrated = read_json(args.out / "config.json")["calibration"]
    labelled, rows = read_labelled(args.labelled), read_labelled(args.heldout)
    texts = common.sample_texts(args.lm, args.fresh_samples, torch.Generator().manual_seed(args.seed + 1))
    with common.scoring(scorer.run.model, len(rows) + len(texts), "measuring"):
        scores = -scorer.run([row.text for row in rows])  # [N], the larger the more toxic
        p_toxic = scorer(texts).double().exp()  # [N]
    highest = {texts[i]: p_toxic[i].item() for i in p_toxic.argsort(descending=True)[:1000].tolist()}
    top = list(highest.items())[:30]
    common.fill_card(
        args,
        scorer.run.model,
        **calibrated,
        rows=len(labelled),
        toxic=sum(row.label for row in labelled),
        stories=len(common.read_stories(args.stories)),
        sources=source_table(scores, rows, -calibrated["bias"]),
        seed=args.seed + 1,
        mean=common.mean_and_error(p_toxic),
        tenth=common.mean_and_error(p_toxic.pow(10)),
        lm=fingerprint(args.lm),
        top=len(top),
        samples="\n".join(f"| {score:.4f} | {' '.join(text.split())} |" for text, score in top),
    )
