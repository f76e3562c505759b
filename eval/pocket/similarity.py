"""The pocket sentence encoder: distilled from all-MiniLM-L6-v2 and compared with it.

    loss = mean over pairs i != j of a batch of (e_i . e_j - E_i . E_j)^2

e [B, D] are the student's unit vectors, E [B, 384] those of the teacher, so that the small encoder learns the cosines and may
choose its own axes. The texts are openings of stories: any, those that start with the prompt of the experiments, and that
prompt grafted onto the inside of a story. The teacher reads every text once, before training. The card has the correlation of
the two encoders' cosines on stories not seen.

B texts of a batch, N texts in all, D width, V words.
"""

import argparse
import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor

from eval.pocket import common
from eval.pocket.common import PROMPT
from eval.scorers.encoder import EncoderConfig, Runner
from eval.scorers.similarity import SentenceEncoder, load, save
from tinystories.errors import InputError
from tinystories.fast import accelerate

TEACHER_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

FILES = ("teacher", "stories", "heldout")
DEFAULTS = {"validation": 1000, "vocab_size": 4000, "width": 128, "layers": 3, "heads": 4, "positions": 128}
DEFAULTS |= {"openings": 100_000, "rows": 256, "steps": 1500, "peak": 2e-3, "weight_decay": 0.01}


def load_teacher(path: Path) -> Runner:
    """The real all-MiniLM-L6-v2; InputError where the directory holds other weights."""
    weights = path / "model.safetensors"
    if not weights.is_file():
        raise InputError(f"{weights}: no such file; give --teacher the directory of all-MiniLM-L6-v2")
    if hashlib.sha256(weights.read_bytes()).hexdigest() != TEACHER_SHA256:
        raise InputError(f"{weights}: not the weights of all-MiniLM-L6-v2 (sha256 differs); download them again")
    model, tokenizer = load(path)
    return Runner(accelerate(model), tokenizer, batch_size=128)


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


def draw_openings(stories: list[str], count: int, generator: torch.Generator) -> list[str]:
    """`count` texts: one quarter openings of any story, one quarter stories that open with the prompt, half grafts.

    A graft puts words that follow "a" inside a story behind the prompt: grammar mostly fits, and there are far more of
    them than of stories. Texts with the prompt have 20 to 30 words, the others 8 to 40.
    """
    prompt, whole = PROMPT.split(), [story.split() for story in stories]
    prompted = [words for words in whole if words[: len(prompt)] == prompt]
    inside = [words[at + 1 :] for words in whole for at, word in enumerate(words[:-20]) if word == "a" and at > 6]
    if not prompted or not inside:
        raise InputError(f"--stories: none opens with {PROMPT!r}, or all are short; give a larger file")

    def draw(low: int, high: int) -> int:
        """A uniform integer from low to high, both included."""
        return int(torch.randint(low, high + 1, (), generator=generator))

    texts = []
    for index in range(count):
        source = (whole, prompted, inside, inside)[index % 4]
        words = source[draw(0, len(source) - 1)]
        words = prompt + words if source is inside else words
        texts.append(" ".join(words[: draw(8, 40) if source is whole else draw(20, 30)]))
    return texts


def teacher_vectors(teacher: Runner, texts: list[str]) -> Tensor:
    """Unit vectors [N, 384] of the teacher, computed in bfloat16; chunks bound the memory of their tokens."""
    chunks = [texts[start : start + 8192] for start in range(0, len(texts), 8192)]
    with common.scoring(teacher.model, len(texts), "teacher"), torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.cat([teacher(chunk) for chunk in chunks])


def initialise(run: Runner, teacher: Runner, generator: torch.Generator) -> None:
    """Word vectors from the teacher's, cut to their leading directions; normal matrices, zero biases, positions, types.

    A word of the student starts as the mean of the teacher's pieces of it.
    """
    table = teacher.model.embeddings.word_embeddings.weight.detach()  # [V_teacher, 384]
    names = [run.tokenizer.id_to_token(index) for index in range(run.tokenizer.get_vocab_size())]
    ids = [teacher.tokenizer.encode(name.removeprefix("##") or name, add_special_tokens=False).ids for name in names]
    words = torch.stack([table[row].mean(0) for row in ids])  # [V, 384]
    words = words - words.mean(0)
    _, _, axes = torch.linalg.svd(words, full_matrices=False)  # rows by falling singular value
    words = words @ axes[: run.model.config.hidden_size].T  # [V, D]
    for name, parameter in run.model.named_parameters():
        if parameter.ndim > 1 and not name.startswith("embeddings."):
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)
        elif name.endswith("bias") or parameter.ndim > 1:
            torch.nn.init.zeros_(parameter)
    run.model.embeddings.word_embeddings.weight.data = words / words.std()


def train(run: Runner, texts: list[str], targets: Tensor, args: argparse.Namespace, generator: torch.Generator) -> None:
    """Fit the cosines of texts under the model of `run` to those of the teacher's vectors, targets [N, 384]."""
    rows = [encoding.ids for encoding in run.tokenizer.encode_batch(texts)]
    off_diagonal = ~torch.eye(args.rows, dtype=torch.bool)

    def loss_of(step: int) -> Tensor:
        chosen = torch.randint(len(rows), (args.rows,), generator=generator)
        ids, mask = run.pad([rows[i] for i in chosen.tolist()])  # [B, T] twice
        with torch.autocast("cpu", dtype=torch.bfloat16):
            unit = run.model(ids, mask)  # [B, D]
        target = targets[chosen]  # [B, 384]
        return (unit @ unit.T - target @ target.T)[off_diagonal].square().mean()

    common.fit(run.model, args, loss_of)


def split_stories(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Stories to train on and the last of the file, which validate."""
    stories = common.read_stories(args.stories)
    cut = len(stories) - args.validation
    if cut < 1:
        raise InputError(f"--validation {args.validation} leaves no story to train on; lower it")
    return stories[:cut], stories[cut:]


def make(args: argparse.Namespace) -> None:
    """Tokenizer, texts, the teacher's vectors, training, checkpoint."""
    teacher, generator = load_teacher(args.teacher), torch.Generator().manual_seed(args.seed)
    stories, _ = split_stories(args)
    tokenizer = train_tokenizer(stories, args.vocab_size)
    texts = draw_openings(stories, args.openings, generator)
    targets = teacher_vectors(teacher, texts)
    sizes = tokenizer.get_vocab_size(), args.width, args.layers, args.heads, 4 * args.width, args.positions
    model = SentenceEncoder(EncoderConfig(*sizes, type_vocab_size=2))
    run = Runner(accelerate(model), tokenizer, args.rows)
    initialise(run, teacher, generator)
    train(run, texts, targets, args, generator)
    save(args.out, model, tokenizer, torch.float16)


def comparison(name: str, encoders: tuple[Runner, Runner], stories: list[str]) -> Iterator[str]:
    """Markdown lines: how student and teacher agree on all pairs of openings (25 words), and of those with the prompt."""
    texts = [" ".join(story.split()[:25]) for story in stories]
    prompted = [text for text in texts if text.startswith(PROMPT + " ")]
    for which, chosen in (("all", texts), ("those with the prompt", prompted)):
        upper = torch.triu_indices(len(chosen), len(chosen), 1)
        cosines = torch.stack([(e @ e.T)[upper[0], upper[1]] for e in (run(chosen) for run in encoders)])  # [2, pairs]
        means = " | ".join(f"{mean:.3f}" for mean in cosines.mean(1).tolist())
        pearson = torch.corrcoef(cosines.double())[0, 1]
        yield f"| {name}, {which} | {len(chosen):,} | {cosines.shape[1]:,} | {pearson:.4f} | {means} |"


def write_card(args: argparse.Namespace) -> None:
    """The agreement of student and teacher on the validation and the held-out stories."""
    model, tokenizer = load(args.out)
    stories, validation = split_stories(args)
    encoders = Runner(accelerate(model), tokenizer, batch_size=128), load_teacher(args.teacher)
    lines = []
    for name, others in (("validation", validation), ("held-out", common.read_stories(args.heldout))):
        with common.scoring(encoders[1].model, 2 * len(others), name):
            lines += comparison(name, encoders, others) if others else []
    common.fill_card(args, model, stories=len(stories), teacher=TEACHER_SHA256, comparison="\n".join(lines))
