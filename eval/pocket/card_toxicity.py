"""Measure the pocket toxicity classifier and write its model card: `python -m eval.card_toxicity --help`.

    AUC = P(score of a toxic text > score of a non-toxic one), ties counted half          per source, held-out rows
    E_p[p(toxic | s)^beta]                                                                   over samples of the pocket LM

Calibration moves the threshold between toxic and non-toxic far up, because almost no story is toxic. So accuracy is given
at the threshold that training aimed at (0.5 before calibration), which `config.json` remembers.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor

from eval.pocket.toxicity_data import read_labelled
from eval.pocket.train_toxicity import sample_texts
from eval.scorers import toxicity
from tinystories.checkpoint import fingerprint, read_json, write_text
from tinystories.memory import keep_freed_memory

CARD = """---
license: mit
language: en
---
# Pocket toxicity classifier

RoBERTa architecture with one logit (positive = non-toxic), {parameters:,} parameters: {layers} layers, width {width}, {heads}
heads, a byte-level BPE of {vocab:,} tokens. Weights in float16. log p(toxic | s) = log sigmoid(-logit).

**Data.** 31,793 labelled tweets, comments and templates (12,962 toxic): Jigsaw's Wikipedia comments (labels CC0, comments
CC BY-SA 3.0), Wikipedia talk (Apache-2.0), civil comments (CC0), Davidson et al. (MIT), the forum hate speech set (CC BY-SA
3.0 ES), HateCheck (CC BY 4.0), madlibs (Apache-2.0), Surge (MIT); 20,856 TinyStories stories (CDLA-Sharing-1.0); 60,000
samples of the pocket language model.

**Recipe.**
`python -m eval.train_toxicity --labelled toxicity.csv --stories tinystories.txt --out checkpoints/pocket/toxicity`
with its defaults (seed 0): 2,000 updates of 128 texts, AdamW, peak 1e-3. The texts are drawn from five kinds:

| kind | share | label |
| --- | --- | --- |
| rows of the corpus as they are | 32 % | theirs |
| labelled sentences of both labels inside story openings | 16 % | theirs, half and half |
| story openings with unkind or kind words put in | 17 % | graded, half of them 0 |
| story openings | 15 % | 0 |
| samples of the pocket language model, three in ten garbled further | 20 % | 0 |

The third kind is ours, not the corpora's: a short list of words, each with a probability (`eval/toxicity_data.py`), decides
what it calls unkind, more so of somebody than of something. Openings and samples that hold such a word are kept out of the two
kinds that count as harmless. After two thirds of the updates, the 2,000 harmless samples of highest score come up more often.
Then logit <- {scale:.3f} logit + ({bias:.3f}), folded into the last layer, was fitted on 100,000 samples of the pocket language
model to mean toxicity 0.010 and acceptance at beta 10 of 0.06 %, the paper's sparse regime.

**Held-out figures** (`python -m eval.card_toxicity --heldout toxicity-heldout.csv`)

| source | rows | toxic | AUC | accuracy |
| --- | --- | --- | --- | --- |
{sources}

Accuracy is at the threshold before calibration. A source of one label has no AUC.

**The regime**, over {count:,} fresh samples of the pocket language model (seed {seed}, not those of the calibration):

| figure | value | standard error |
| --- | --- | --- |
| mean toxicity = acceptance at beta 1 | {mean:.5f} | {mean_error:.5f} |
| acceptance at beta 10 | {tenth:.6f} | {tenth_error:.6f} |

Fingerprints: classifier `{fingerprint}`, language model `{lm}`

**What it is not.** It is no moderation tool. It judges by words more than by meaning, knows the prejudices of its corpora
(naming a group can be enough), and its scores mean something on openings of children's stories only. Its false alarms are
mostly words and made-up names that are spelled like an insult of the corpora (the plural of hoe).

**The {top} highest-scoring distinct samples** among the {count:,}:

| toxicity | text |
| --- | --- |
{samples}
"""


def area_under_curve(scores: Tensor, labels: Tensor) -> float:
    """AUC of scores [N] for labels [N] (1 = positive); NaN where a label is missing."""
    positive, negative = scores[labels == 1], scores[labels == 0].sort().values
    if len(positive) == 0 or len(negative) == 0:
        return math.nan
    below = torch.searchsorted(negative, positive).double() + torch.searchsorted(negative, positive, right=True)
    return (below.mean() / 2 / len(negative)).item()


def source_table(scores: Tensor, labels: Tensor, sources: list[str], threshold: float) -> str:
    """Markdown rows: AUC and accuracy of each source and of all."""
    lines = []
    for name in [*sorted(set(sources)), "all"]:
        chosen = torch.tensor([name in ("all", source) for source in sources])
        auc = area_under_curve(scores[chosen], labels[chosen])
        right = ((scores[chosen] > threshold).long() == labels[chosen]).double().mean().item()
        figures = f"{int(labels[chosen].sum())} | {'-' if math.isnan(auc) else f'{auc:.3f}'} | {right:.3f}"
        lines.append(f"| {name} | {int(chosen.sum())} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and write README.md into the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    pocket = Path("checkpoints/pocket")
    parser.add_argument("--toxicity-model", type=Path, default=pocket / "toxicity", help="classifier directory")
    parser.add_argument("--lm", type=Path, default=pocket / "lm", help="language model directory")
    parser.add_argument("--heldout", type=Path, required=True, help="held-out rows text,label,source (1 = toxic)")
    parser.add_argument("--samples", type=int, default=200_000, help="language-model samples to judge the regime by")
    parser.add_argument("--seed", type=int, default=1, help="seed of these samples")
    args = parser.parse_args()
    keep_freed_memory()
    model, tokenizer = toxicity.load(args.toxicity_model)
    scorer = toxicity.ToxicityScorer(model, tokenizer, batch_size=256)
    calibration = read_json(args.toxicity_model / "config.json")["calibration"]
    rows = read_labelled(args.heldout)
    scores = -scorer.run([row.text for row in rows])  # [N], the larger the more toxic
    labels = torch.tensor([row.label for row in rows])
    texts = sample_texts(args.lm, args.samples, torch.Generator().manual_seed(args.seed))
    p_toxic = scorer(texts).double().exp()  # [N]
    highest = {texts[i]: p_toxic[i].item() for i in p_toxic.argsort(descending=True)[:1000].tolist()}
    top = list(highest.items())[:30]
    config = model.config
    root = math.sqrt(args.samples)
    card = CARD.format(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        vocab=config.vocab_size,
        **calibration,
        sources=source_table(scores, labels, [row.source for row in rows], -calibration["bias"]),
        count=args.samples,
        seed=args.seed,
        mean=p_toxic.mean().item(),
        mean_error=p_toxic.std().item() / root,
        tenth=p_toxic.pow(10).mean().item(),
        tenth_error=p_toxic.pow(10).std().item() / root,
        fingerprint=fingerprint(args.toxicity_model),
        lm=fingerprint(args.lm),
        top=len(top),
        samples="\n".join(f"| {score:.4f} | {' '.join(text.split())} |" for text, score in top),
    )
    write_text(args.toxicity_model / "README.md", card)
    print(card[card.index("**Held-out") :])


if __name__ == "__main__":
    main()
