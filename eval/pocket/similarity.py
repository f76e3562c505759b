"""The pocket sentence encoder: distilled from all-MiniLM-L6-v2 and compared with it.

    loss = mean over pairs i != j of a batch of (e_i . e_j - E_i . E_j)^2

e [B, D] are the unit vectors of the student, E [B, 384] those of the teacher: the student learns
the cosines and may choose its own axes. --teacher is the directory of all-MiniLM-L6-v2; --stories
and --heldout have a line <|endoftext|> after each story. The last --validation stories are not
trained on; the student reads --openings texts of at most --positions tokens, --rows in a batch.
B texts of a batch, N texts, D width, V words.
"""

import itertools
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from torch import Tensor

from eval.pocket import common
from eval.pocket.common import PROMPT
from eval.scorers.encoder import EncoderConfig, Runner
from eval.scorers.similarity import SentenceEncoder, load, save
from tinystories.checkpoint import digest_of
from tinystories.errors import InputError
from tinystories.fast import pack

TEACHER_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def add_options(parser: ArgumentParser) -> None:
    """The options, with the values of the shipped checkpoint."""
    add = common.add_options
    add(parser, "teacher", "stories", "heldout", "out", validation=1000, seed=0)
    add(parser, vocab_size=4000, width=128, layers=3, heads=4, positions=128)
    add(parser, openings=100_000, rows=256, steps=1500, peak=2e-3, weight_decay=0.01)


def load_teacher(path: Path) -> Runner:
    """The real all-MiniLM-L6-v2; InputError where the directory holds other weights."""
    if digest_of(path / "model.safetensors") != TEACHER_SHA256:
        raise InputError(f"{path}: not all-MiniLM-L6-v2 (sha256 differs); download it again")
    model, tokenizer = load(path)
    return Runner(pack(model), tokenizer, batch_size=128)


def train_tokenizer(stories: list[str], vocab_size: int) -> Tokenizer:
    """Lower-case WordPiece that puts [CLS] before and [SEP] behind a text.

    The trainer numbers the characters inside words in the order of a hash map, and ties follow the
    numbers. Given as special tokens they have one order, so that equal stories give equal results.
    """
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    characters = {c for story in stories for c in tokenizer.normalizer.normalize_str(story)}
    inside = [f"##{character}" for character in sorted(characters) if character.isalnum()]
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=SPECIAL + inside)
    trained = Tokenizer.from_str(tokenizer.to_str())
    trained.train_from_iterator(stories, trainer)
    tokenizer.model = models.WordPiece(trained.get_vocab(), unk_token="[UNK]")
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


def draw_openings(stories: list[str], count: int, generator: torch.Generator) -> list[str]:
    """Openings of any story, of stories that begin with the prompt, and two grafts, in turn.

    A graft is the prompt, continued by words that follow "a" inside a story: the grammar mostly
    fits, and there are far more of them than of stories.
    """
    whole = [story.split() for story in stories]
    prompted = [words for words in whole if " ".join(words).startswith(PROMPT + " ")]
    places = [(words, at) for words in whole for at in range(7, len(words) - 20)]
    grafts = [PROMPT.split() + words[at + 1 : at + 31] for words, at in places if words[at] == "a"]
    if not prompted or not grafts:
        raise InputError(f"--stories: none opens with {PROMPT!r}, or all are short; give others")
    kinds = ((whole, 8, 40), (prompted, 20, 30), (grafts, 20, 30), (grafts, 20, 30))
    texts = []
    for source, shortest, longest in itertools.islice(itertools.cycle(kinds), count):
        words = source[int(torch.randint(len(source), (), generator=generator))]
        length = int(torch.randint(shortest, longest + 1, (), generator=generator))
        texts.append(" ".join(words[:length]))
    return texts


def initialise(run: Runner, teacher: Runner, generator: torch.Generator) -> None:
    """Word vectors of the teacher, cut to their leading directions; normal matrices, zero biases.

    A word of the student starts as the mean of the pieces that the teacher has for it.
    """
    table = teacher.model.embeddings.word_embeddings.weight.detach()  # [V_teacher, 384]
    names = [run.tokenizer.id_to_token(i) for i in range(run.tokenizer.get_vocab_size())]
    names = [name.removeprefix("##") or name for name in names]
    pieces = [teacher.tokenizer.encode(name, add_special_tokens=False).ids for name in names]
    words = torch.stack([table[ids].mean(0) for ids in pieces])  # [V, 384]
    words = words - words.mean(0)
    axes = torch.linalg.svd(words, full_matrices=False).Vh  # by falling singular value
    words = words @ axes[: run.model.config.hidden_size].T  # [V, D]
    for name, parameter in run.model.named_parameters():
        if parameter.ndim > 1 and not name.startswith("embeddings."):
            parameter.data.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
        elif name.endswith("bias") or parameter.ndim > 1:
            parameter.data.zero_()
    run.model.embeddings.word_embeddings.weight.data = words / words.std()


def train(
    run: Runner, texts: list[str], targets: Tensor, args: Namespace, generator: torch.Generator
) -> None:
    """Fit the cosines of the texts to those of the teacher's vectors, targets [N, 384]."""
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


def agreement(student: Runner, teacher: Runner, stories: list[str], opening: str = "") -> float:
    """Pearson correlation of the encoders' cosines over all pairs of openings of 25 words."""
    texts = [" ".join(story.split()[:25]) for story in stories if story.startswith(opening)]
    upper = torch.ones(len(texts), len(texts)).triu(1).bool()
    cosines = [(unit @ unit.T)[upper] for unit in (student(texts), teacher(texts))]  # [pairs] each
    return torch.corrcoef(torch.stack(cosines).double())[0, 1].item()


def make(args: Namespace) -> dict:
    """Write the checkpoint; how its cosines agree with those of the teacher."""
    teacher, generator = load_teacher(args.teacher), torch.Generator().manual_seed(args.seed)
    stories, heldout = common.read_stories(args.stories), common.read_stories(args.heldout)
    cut = len(stories) - args.validation
    tokenizer = train_tokenizer(stories[:cut], args.vocab_size)
    texts = draw_openings(stories[:cut], args.openings, generator)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        targets = teacher(texts)  # [N, 384]
    vocab_size, inner = tokenizer.get_vocab_size(), 4 * args.width
    config = EncoderConfig(
        vocab_size, args.width, args.layers, args.heads, inner, args.positions, type_vocab_size=2
    )
    run = Runner(SentenceEncoder(config), tokenizer, args.rows)
    initialise(run, teacher, generator)
    train(run, texts, targets, args, generator)
    save(args.out, run.model, tokenizer, torch.float16)
    student = Runner(pack(load(args.out)[0]), tokenizer, batch_size=128)
    return {
        "pearson_validation": agreement(student, teacher, stories[cut:]),
        "pearson_heldout": agreement(student, teacher, heldout),
        "pearson_heldout_with_prompt": agreement(student, teacher, heldout, PROMPT + " "),
    }
