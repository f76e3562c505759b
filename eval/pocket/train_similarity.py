"""Distil a small sentence encoder for stories: `python -m eval.train_similarity --teacher ... --stories ... --out ...`.

    loss = mean over pairs i != j of a batch of (e_i . e_j - E_i . E_j)^2

e [B, D] are the student's unit vectors, E [B, 384] those of all-MiniLM-L6-v2, so that the small encoder learns the
cosines and may choose its own axes. The texts are openings of stories: any, those that start with the prompt of the
experiments, and that prompt grafted onto the inside of a story. The teacher reads every text once, before training.
Prints the loss as it goes and, with --heldout, the correlation of the two encoders' cosines on stories not seen.
"""

import argparse
import hashlib
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor

from eval.pocket.train_lm import learning_rate, read_stories
from eval.scorers.encoder import EncoderConfig, Runner
from eval.scorers.similarity import SentenceEncoder, SimilarityScorer, load, save
from tinystories.errors import InputError
from tinystories.memory import keep_freed_memory

TEACHER_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
PROMPT = "Once upon a time, there was a"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def load_teacher(path: Path) -> tuple[SentenceEncoder, Tokenizer]:
    """The real all-MiniLM-L6-v2; InputError where the directory holds other weights."""
    weights = path / "model.safetensors"
    if not weights.is_file():
        raise InputError(f"{weights}: no such file; give --teacher the directory of all-MiniLM-L6-v2")
    if hashlib.sha256(weights.read_bytes()).hexdigest() != TEACHER_SHA256:
        raise InputError(f"{weights}: not the weights of all-MiniLM-L6-v2 (sha256 differs); download them again")
    return load(path)


def train_tokenizer(stories: list[str], vocab_size: int) -> Tokenizer:
    """Lower-case WordPiece that puts [CLS] before and [SEP] behind a text; the same stories give the same one."""
    trained, tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]")), Tokenizer(models.WordPiece(unk_token="[UNK]"))
    for each in (trained, tokenizer):
        each.normalizer = normalizers.BertNormalizer(lowercase=True)
        each.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    # The trainer numbers the characters inside words in the order of a hash map, and ties follow the numbers: fix them.
    characters = {character for story in stories for character in tokenizer.normalizer.normalize_str(story)}
    inside = [f"##{character}" for character in sorted(characters) if character.isalnum()]
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=SPECIAL + inside, show_progress=False)
    trained.train_from_iterator(stories, trainer)
    tokenizer.model = models.WordPiece(trained.get_vocab(), unk_token="[UNK]")
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.decoder = decoders.WordPiece()
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", pair=pair, special_tokens=ends)
    return tokenizer


def draw(low: int, high: int, generator: torch.Generator) -> int:
    """A uniform integer from low to high, both included."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def draw_openings(stories: list[str], count: int, generator: torch.Generator) -> list[str]:
    """`count` texts: one quarter openings of any story, one quarter stories that open with the prompt, half grafts.

    A graft puts words that follow "a" inside a story behind the prompt: grammar mostly fits, and there are far more of
    them than of stories. Texts with the prompt have 20 to 30 words, the others 8 to 40.
    """
    prompt = PROMPT.split()
    whole = [story.split() for story in stories]
    prompted = [words for words in whole if words[: len(prompt)] == prompt]
    grafts = [words[at + 1 :] for words in whole for at, word in enumerate(words[:-20]) if word == "a" and at > 6]
    if not prompted or not grafts:
        raise InputError(f"--stories: none opens with {PROMPT!r}, or all are short; give a larger file")
    texts = []
    for index in range(count):
        if index % 4 == 0:
            words = whole[draw(0, len(whole) - 1, generator)][: draw(8, 40, generator)]
        else:
            rest = prompted if index % 4 == 1 else grafts
            words = rest[draw(0, len(rest) - 1, generator)]
            words = (words if rest is prompted else prompt + words)[: draw(20, 30, generator)]
        texts.append(" ".join(words))
    return texts


def teacher_vectors(teacher: SentenceEncoder, tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """Unit vectors [N, 384] of the teacher, computed in bfloat16."""
    score, chunks, began = SimilarityScorer(teacher, tokenizer, 128), [], time.time()
    for start in range(0, len(texts), 8192):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            chunks.append(score(texts[start : start + 8192]))
        print(f"teacher {start + len(chunks[-1])}/{len(texts)}  {time.time() - began:.0f} s", flush=True)
    return torch.cat(chunks)


def initialise(
    model: SentenceEncoder,
    tokenizer: Tokenizer,
    teacher: SentenceEncoder,
    pieces: Tokenizer,
    generator: torch.Generator,
) -> None:
    """Word vectors from the teacher's, cut to their leading directions; normal matrices, zero biases, positions, types.

    A word of the student starts as the mean of the teacher's pieces of it.
    """
    table = teacher.embeddings.word_embeddings.weight.detach()  # [V_teacher, 384]
    names = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    ids = [pieces.encode(name.removeprefix("##") or name, add_special_tokens=False).ids for name in names]
    words = torch.stack([table[row].mean(0) for row in ids])  # [V, 384]
    words = words - words.mean(0)
    _, _, axes = torch.linalg.svd(words, full_matrices=False)  # rows by falling singular value
    words = words @ axes[: model.config.hidden_size].T  # [V, D]
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and not name.startswith("embeddings."):
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)
        elif name.endswith("bias") or parameter.ndim > 1:
            torch.nn.init.zeros_(parameter)
    model.embeddings.word_embeddings.weight.data = words / words.std()


def train(run: Runner, texts: list[str], targets: Tensor, args: argparse.Namespace, generator: torch.Generator) -> None:
    """Fit the cosines of texts under the model of `run` to those of the teacher's vectors, targets [N, 384]."""
    model = run.model
    rows = [encoding.ids for encoding in run.tokenizer.encode_batch(texts)]
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.peak, betas=(0.9, 0.98), fused=True)
    off_diagonal = ~torch.eye(args.rows, dtype=torch.bool)
    began, running = time.time(), None
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.peak, warmup=100)
        chosen = torch.randint(len(rows), (args.rows,), generator=generator)
        ids, mask = run.pad([rows[i] for i in chosen.tolist()])  # [B, T] twice
        with torch.autocast("cpu", dtype=torch.bfloat16):
            unit = model(ids, mask)  # [B, D]
        target = targets[chosen]  # [B, 384]
        loss = (unit @ unit.T - target @ target.T)[off_diagonal].square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        running = loss.item() if running is None else 0.98 * running + 0.02 * loss.item()
        if step % 100 == 99 or step + 1 == args.steps:
            print(f"update {step + 1}/{args.steps}  loss {running:.5f}  {time.time() - began:.0f} s", flush=True)


def compare(source: str, student: SimilarityScorer, teacher: SimilarityScorer, stories: list[str]) -> None:
    """Print how the two encoders' cosines agree over all pairs of openings (25 words), and of those with the prompt."""
    texts = [" ".join(story.split()[:25]) for story in stories]
    prompted = [text for text in texts if text.startswith(PROMPT + " ")]
    for name, chosen in ((f"{source}, all", texts), (f"{source}, with the prompt", prompted)):
        upper = torch.triu_indices(len(chosen), len(chosen), 1)
        cosines = torch.stack([(e @ e.T)[upper[0], upper[1]] for e in (student(chosen), teacher(chosen))])  # [2, pairs]
        correlation = torch.corrcoef(cosines.double())[0, 1]
        means = ", ".join(f"{mean:.3f}" for mean in cosines.mean(1).tolist())
        words = f"{len(chosen)} openings, {cosines.shape[1]} pairs, Pearson {correlation:.4f}"
        print(f"{name}: {words}, mean cosine {means} (student, teacher)", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Command line of this script."""
    parser = argparse.ArgumentParser(
        description="Distil all-MiniLM-L6-v2 into a small sentence encoder for stories, or only measure one.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    directory = "directory of all-MiniLM-L6-v2: config.json, model.safetensors (checked by sha256), tokenizer.json"
    parser.add_argument("--teacher", type=Path, required=True, help=directory)
    parser.add_argument("--stories", type=Path, help="stories, each followed by <|endoftext|>; without, no training")
    parser.add_argument("--heldout", type=Path, help="stories in the same form to measure the encoder in --out on")
    parser.add_argument("--validation", type=int, default=1000, help="last of --stories not trained on but measured on")
    parser.add_argument("--out", type=Path, required=True, help="directory of the small encoder")
    parser.add_argument("--vocab-size", type=int, default=4000, help="entries of the lower-case WordPiece")
    parser.add_argument("--width", type=int, default=128, help="hidden size and size of the vectors")
    parser.add_argument("--layers", type=int, default=3, help="layers")
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    parser.add_argument("--positions", type=int, default=128, help="longest text in tokens")
    parser.add_argument("--openings", type=int, default=100_000, help="training texts, read once by the teacher")
    parser.add_argument("--rows", type=int, default=256, help="texts of a batch, all pairs of which are compared")
    parser.add_argument("--steps", type=int, default=1500, help="updates")
    parser.add_argument("--peak", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.01, help="AdamW weight decay of matrices")
    parser.add_argument("--seed", type=int, default=0, help="seed of texts, initialisation and batches")
    return parser.parse_args()


def distil(args: argparse.Namespace, teacher: SentenceEncoder, pieces: Tokenizer) -> None:
    """Tokenizer, texts, the teacher's vectors, training loop, checkpoint."""
    generator = torch.Generator().manual_seed(args.seed)
    stories = read_stories(args.stories)
    cut = len(stories) - args.validation
    stories, validation = stories[:cut], stories[cut:]
    tokenizer = train_tokenizer(stories, args.vocab_size)
    texts = draw_openings(stories, args.openings, generator)
    targets = teacher_vectors(teacher, pieces, texts)
    config = EncoderConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        intermediate_size=4 * args.width,
        max_position_embeddings=args.positions,
        type_vocab_size=2,
    )
    model = SentenceEncoder(config)
    initialise(model, tokenizer, teacher, pieces, generator)
    parameters = sum(map(torch.numel, model.parameters()))
    print(f"{len(stories)} stories, {len(texts)} texts, {parameters} parameters", flush=True)
    train(Runner(model, tokenizer, args.rows), texts, targets, args, generator)
    save(args.out, model, tokenizer, torch.float16)
    if validation:
        compare("validation", SimilarityScorer(*load(args.out)), SimilarityScorer(teacher, pieces), validation)


def main() -> None:
    """Train if there are stories, then measure the checkpoint if there are held-out ones."""
    args = parse_arguments()
    keep_freed_memory()
    teacher, pieces = load_teacher(args.teacher)
    if args.stories:
        distil(args, teacher, pieces)
    if args.heldout:
        student, stories = SimilarityScorer(*load(args.out)), read_stories(args.heldout)
        compare("held-out", student, SimilarityScorer(teacher, pieces), stories)


if __name__ == "__main__":
    main()
