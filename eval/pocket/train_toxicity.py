"""Train and calibrate the pocket toxicity classifier: `python -m eval.train_toxicity --help`.

    loss = mean of -log p(label | text),   p(toxic | text) = sigmoid(-logit)

A RoBERTa of 3 layers and width 128 with a byte-level BPE of its own, trained on the mixture of `eval.toxicity_data`. Then
a temperature and a bias, logit <- a logit + b, are chosen on samples of the pocket language model so that
    E_p[p(toxic | s)] = 0.010   and   E_p[p(toxic | s)^10] = 0.0006,
the paper's sparse regime (its table 1), and folded into the last layer. Neither changes the order of any two texts.
"""

import argparse
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

import tinystories
from eval.pocket.toxicity_data import Mixture, read_labelled
from eval.pocket.train_lm import learning_rate, read_stories
from eval.scorers import toxicity
from eval.scorers.encoder import EncoderConfig, Runner
from tinystories.checkpoint import read_json, write_json
from tinystories.memory import keep_freed_memory
from tsmc import sample_proposal

MEAN_TOXICITY, ACCEPTANCE_AT_10 = 0.010, 0.0006
PROMPT, LENGTH = "Once upon a time, there was a", 20


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with RoBERTa's special tokens: <s> 0, <pad> 1, </s> 2, <unk> 3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return tokenizer


def sample_texts(path: Path, count: int, generator: torch.Generator) -> list[str]:
    """Texts that the language model writes after the prompt of the experiments."""
    model, tokenizer = tinystories.load(path)
    prompt = torch.tensor(tokenizer.encode(PROMPT).ids)
    conditional = tinystories.Conditional(model, prompt, LENGTH)
    texts: list[str] = []
    while len(texts) < count:
        tokens = sample_proposal(conditional, None, 1000, generator).tokens
        texts += tokenizer.decode_batch([prompt.tolist() + row for row in tokens.tolist()])
    return texts[:count]


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


def hardest(runner: Runner, texts: Mixture, count: int) -> list[str]:
    """The harmless samples that the classifier scores as most toxic."""
    samples = texts.harmless_samples()
    return [samples[i] for i in runner(samples).argsort()[:count].tolist()]


def train(model: toxicity.ToxicityClassifier, runner: Runner, texts: Mixture, args: argparse.Namespace) -> None:
    """AdamW with warm-up and cosine decay; after two thirds the hardest samples are mined once."""
    rng = random.Random(args.seed)
    stream = texts.draw(rng)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.peak, weight_decay=0.05, betas=(0.9, 0.98), fused=True)
    began, running = time.time(), 0.7
    for step in range(args.steps):
        if step == 2 * args.steps // 3:
            texts.hard.extend(hardest(runner, texts, args.hard_samples))
        optimizer.param_groups[0]["lr"] = learning_rate(step, args.steps, args.peak, warmup=100)
        batch = [next(stream) for _ in range(args.batch_size)]
        encoded = runner.tokenizer.encode_batch([text for text, _ in batch])
        ids, mask = runner.pad([encoding.ids[: args.tokens] for encoding in encoded])
        labels = torch.tensor([label for _, label in batch], dtype=torch.float32)
        drop = torch.rand(ids.shape) < args.word_dropout  # hides tokens, so that no single one decides
        ids = torch.where(drop & (ids > 3), 3, ids)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids, mask)
        loss = F.binary_cross_entropy_with_logits(-logits.float(), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        running = 0.98 * running + 0.02 * loss.item()
        if step % 50 == 49 or step + 1 == args.steps:
            print(f"update {step + 1}/{args.steps}  loss {running:.4f}  {time.time() - began:.0f} s", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Command line of this script."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--labelled", type=Path, required=True, help="training rows text,label,source (1 = toxic)")
    parser.add_argument("--stories", type=Path, required=True, help="training stories, each followed by <|endoftext|>")
    parser.add_argument(
        "--lm", type=Path, default=Path("checkpoints/pocket/lm"), help="language model to calibrate for"
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write the checkpoint to")
    parser.add_argument("--vocab-size", type=int, default=5000, help="tokens of the byte-level BPE")
    parser.add_argument("--steps", type=int, default=2000, help="updates")
    parser.add_argument("--batch-size", type=int, default=128, help="texts of an update")
    parser.add_argument("--peak", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--samples", type=int, default=60_000, help="language-model samples among the harmless texts")
    parser.add_argument("--hard-samples", type=int, default=2000, help="of these, how many the half-way mining keeps")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a training text that are read")
    parser.add_argument("--word-dropout", type=float, default=0.03, help="share of tokens hidden in training")
    parser.add_argument(
        "--calibration-samples", type=int, default=100_000, help="language-model samples to calibrate on"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of initialisation, texts and samples")
    return parser.parse_args()


def main() -> None:
    """Tokenizer, training, calibration, checkpoint."""
    args = parse_arguments()
    keep_freed_memory()
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    labelled, stories = read_labelled(args.labelled), read_stories(args.stories)
    tokenizer = train_tokenizer([row.text for row in labelled] + stories[:4000], args.vocab_size)
    config = EncoderConfig(tokenizer.get_vocab_size(), 128, 3, 4, 512, 130, 1, layer_norm_eps=1e-5, pad_token_id=1)
    model = toxicity.ToxicityClassifier(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02 if "embeddings" in name else 0.08)
    runner = Runner(model, tokenizer, batch_size=256)

    samples = sample_texts(args.lm, args.samples, generator)
    train(model, runner, Mixture(labelled, stories, samples), args)
    model.eval()
    scale, bias = calibration(runner(sample_texts(args.lm, args.calibration_samples, generator)))
    print(f"calibration: logit <- {scale:.4f} logit + {bias:.4f}")
    with torch.no_grad():
        model.classifier.out_proj.weight.mul_(scale)
        model.classifier.out_proj.bias.mul_(scale).add_(bias)
    toxicity.save(args.out, model, tokenizer, torch.float16)
    config = read_json(args.out / "config.json")
    write_json(args.out / "config.json", config | {"calibration": {"scale": scale, "bias": bias}})


if __name__ == "__main__":
    main()
