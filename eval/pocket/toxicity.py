"""The pocket toxicity classifier: trained, calibrated and measured.

    loss = mean of -log p(label | text),   p(toxic | text) = sigmoid(-logit)
    AUC = P(score of a toxic text > score of a non-toxic one), ties counted half

A RoBERTa with a byte-level BPE of its own learns from the texts of `mixture.py`. Then a and b of logit <- a logit + b
are chosen on samples of the pocket language model so that E_p[p(toxic | s)] = 0.010 and E_p[p(toxic | s)^10] = 0.0006,
the paper's sparse regime (its table 1), and folded into the last layer. That keeps the order of all texts but moves the
threshold far up, because almost no story is toxic: so accuracy is at the threshold that training aimed at.

B texts of a batch, T tokens of a text, N texts that are scored.
"""

import itertools
import math
import random
from argparse import Namespace

import torch
import torch.nn.functional as F
from tokenizers import processors
from torch import Tensor

from eval.pocket import common
from eval.pocket.mixture import Labelled, draw_texts, harmless, read_labelled
from eval.scorers import toxicity
from eval.scorers.encoder import EncoderConfig, Runner
from tinystories.checkpoint import fingerprint, read_json, write_json
from tinystories.fast import accelerate
from tsmc.estimate import mean_estimate

MEAN_TOXICITY, ACCEPTANCE_AT_10 = 0.010, 0.0006
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
UNKNOWN = SPECIAL.index("<unk>")


def train(run: Runner, labelled: list[Labelled], stories: list[str], samples: list[str], args: Namespace) -> None:
    """Fit the classifier of `run`; after two thirds the harmless samples that it scores as most toxic are mined."""
    samples, hard = harmless(samples), []
    stream = draw_texts(random.Random(args.seed), labelled, harmless(stories), samples, hard)

    def loss_of(step: int) -> Tensor:
        if step == 2 * args.steps // 3:
            hard.extend(samples[i] for i in run(samples).argsort()[: args.hard_samples].tolist())
        batch, labels = zip(*itertools.islice(stream, args.batch_size), strict=True)
        ids, mask = run.pad([row.ids[: args.tokens] for row in run.tokenizer.encode_batch(batch)])  # [B, T] twice
        drop = torch.rand(ids.shape) < args.word_dropout  # hides tokens, so that no single one decides
        ids = torch.where(drop & (ids > UNKNOWN), UNKNOWN, ids)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = run.model(ids, mask)  # [B]
        return F.binary_cross_entropy_with_logits(-logits.float(), torch.tensor(labels, dtype=torch.float32))

    common.fit(run.model, args, loss_of, decay_all=True)


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


def make(args: Namespace) -> None:
    """Tokenizer, training, calibration, checkpoint."""
    torch.manual_seed(args.seed)  # of the initial weights and of the tokens that are hidden
    generator = torch.Generator().manual_seed(args.seed)
    labelled, stories = read_labelled(args.labelled), common.read_stories(args.stories)
    tokenizer = common.byte_level_bpe([row.text for row in labelled] + stories[:4000], args.vocab_size, SPECIAL)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    config = EncoderConfig(tokenizer.get_vocab_size(), 128, 3, 4, 512, 130, 1, layer_norm_eps=1e-5, pad_token_id=1)
    model = accelerate(toxicity.ToxicityClassifier(config))
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02 if "embeddings" in name else 0.08)
    run = common.ShownRunner(model, tokenizer, batch_size=256)
    train(run, labelled, stories, common.sample_texts(args.lm, args.samples, generator), args)
    scale, bias = calibration(run(common.sample_texts(args.lm, args.calibration_samples, generator)))
    with torch.no_grad():
        model.classifier.out_proj.weight.mul_(scale)
        model.classifier.out_proj.bias.mul_(scale).add_(bias)
    toxicity.save(args.out, model, tokenizer, torch.float16)
    fields = read_json(args.out / "config.json")
    write_json(args.out / "config.json", fields | {"calibration": {"scale": scale, "bias": bias}})


def source_table(scores: Tensor, rows: list[Labelled], threshold: float) -> str:
    """Markdown lines: AUC and accuracy of scores [N], the larger the more toxic, of each source and of all."""
    labels, lines = torch.tensor([row.label for row in rows]), []
    for name in [*sorted({row.source for row in rows}), "all"]:
        chosen = torch.tensor([name in ("all", row.source) for row in rows])
        score, label = scores[chosen], labels[chosen]
        above = (
            (score[label == 1, None] - score[label == 0]).sign().double().mean().item()
        )  # NaN without one of the labels
        right = ((score > threshold).long() == label).double().mean().item()
        auc = "-" if math.isnan(above) else f"{(1 + above) / 2:.3f}"
        lines.append(f"| {name} | {len(score)} | {int(label.sum())} | {auc} | {right:.3f} |")
    return "\n".join(lines)


def write_card(args: Namespace) -> None:
    """AUC and accuracy on held-out rows, and the regime over samples that the calibration has not seen."""
    model, tokenizer = toxicity.load(args.out)
    run = common.ShownRunner(accelerate(model), tokenizer, batch_size=256)
    calibrated = read_json(args.out / "config.json")["calibration"]
    labelled, heldout = read_labelled(args.labelled), read_labelled(args.heldout)
    counts = {"rows": len(labelled), "toxic": sum(row.label for row in labelled)}
    counts["stories"] = len(common.read_stories(args.stories))
    sources = source_table(-run([row.text for row in heldout]), heldout, -calibrated["bias"])
    seed = args.seed + 1
    texts = common.sample_texts(args.lm, args.fresh_samples, torch.Generator().manual_seed(seed))
    p_toxic = F.logsigmoid(-run(texts)).double().exp()  # [N]
    regime = {"mean": mean_estimate(p_toxic), "tenth": mean_estimate(p_toxic.pow(10)), "seed": seed}
    highest = {texts[i]: p_toxic[i].item() for i in p_toxic.argsort(descending=True)[:1000].tolist()}
    top = [f"| {score:.4f} | {' '.join(text.split())} |" for text, score in highest.items()][:30]
    figures = {"sources": sources, "lm": fingerprint(args.lm), "top": len(top), "samples": "\n".join(top)}
    common.fill_card(args, model, **calibrated, **counts, **regime, **figures)
