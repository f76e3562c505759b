"""The pocket sentence encoder: distilled from all-MiniLM-L6-v2 and compared with it.

    loss = mean over pairs i != j of a batch of (e_i . e_j - E_i . E_j)^2

e [B, D] are the student's unit vectors, E [B, 384] those of the teacher: the small encoder learns the cosines and may
choose its own axes. The texts are openings of stories: any, those that start with the prompt of the experiments, and
that prompt grafted onto the inside of a story. The card has the correlation of the two encoders' cosines.

B texts of a batch, N texts in all, D width, V words.
"""

import hashlib
import itertools
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor

from eval.pocket import common
from eval.scorers.encoder import EncoderConfig, Runner
from eval.scorers.similarity import SentenceEncoder, load, save
from tinystories.errors import InputError
from tinystories.fast import accelerate

TEACHER_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def load_teacher(path: Path) -> Runner:
    """The real all-MiniLM-L6-v2; InputError where the directory holds other weights."""
    weights = path / "model.safetensors"
    if hashlib.sha256(weights.read_bytes()).hexdigest() != TEACHER_SHA256:
        raise InputError(f"{weights}: not the weights of all-MiniLM-L6-v2 (sha256 differs); download them again")
    model, tokenizer = load(path)
    return common.ShownRunner(accelerate(model), tokenizer, batch_size=128)


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
    prompt, whole = common.PROMPT.split(), [story.split() for story in stories]
    prompted = [words for words in whole if words[: len(prompt)] == prompt]
    inside = [words[at + 1 :] for words in whole for at, word in enumerate(words[:-20]) if word == "a" and at > 6]
    if not prompted or not inside:
        raise InputError(f"--stories: none opens with {common.PROMPT!r}, or all are short; give a larger file")
    kinds = ((whole, [], 8, 40), (prompted, [], 20, 30), (inside, prompt, 20, 30), (inside, prompt, 20, 30))
    texts = []
    for source, start, shortest, longest in itertools.islice(itertools.cycle(kinds), count):
        words = start + source[int(torch.randint(len(source), (), generator=generator))]
        texts.append(" ".join(words[: int(torch.randint(shortest, longest + 1, (), generator=generator))]))
    return texts


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


def train(run: Runner, texts: list[str], targets: Tensor, args: Namespace, generator: torch.Generator) -> None:
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


def make(args: Namespace) -> None:
    """Tokenizer, texts, the teacher's vectors, training, checkpoint."""
    teacher, generator = load_teacher(args.teacher), torch.Generator().manual_seed(args.seed)
    stories = common.read_stories(args.stories)[: -args.validation or None]
    tokenizer = train_tokenizer(stories, args.vocab_size)
    texts = draw_openings(stories, args.openings, generator)
    chunks = [texts[start : start + 8192] for start in range(0, len(texts), 8192)]  # bounds the memory of their tokens
    with torch.autocast("cpu", dtype=torch.bfloat16):
        targets = torch.cat([teacher(chunk) for chunk in chunks])  # [N, 384]
    sizes = tokenizer.get_vocab_size(), args.width, args.layers, args.heads, 4 * args.width, args.positions
    model = SentenceEncoder(EncoderConfig(*sizes, type_vocab_size=2))
    run = Runner(model, tokenizer, args.rows)
    initialise(run, teacher, generator)
    train(run, texts, targets, args, generator)
    save(args.out, model, tokenizer, torch.float16)


def comparison(name: str, encoders: tuple[Runner, Runner], stories: list[str]) -> Iterator[str]:
    """Markdown lines: how student and teacher agree on pairs of openings (25 words), all and those with the prompt."""
    texts = [" ".join(story.split()[:25]) for story in stories]
    prompted = [text for text in texts if text.startswith(common.PROMPT + " ")]
    for which, chosen in (("all", texts), ("those with the prompt", prompted)):
        upper = torch.triu_indices(len(chosen), len(chosen), 1)
        cosines = torch.stack([(e @ e.T)[upper[0], upper[1]] for e in (run(chosen) for run in encoders)])  # [2, pairs]
        means = " | ".join(f"{mean:.3f}" for mean in cosines.mean(1).tolist())
        pearson = torch.corrcoef(cosines.double())[0, 1]
        yield f"| {name}, {which} | {len(chosen):,} | {cosines.shape[1]:,} | {pearson:.4f} | {means} |"


def write_card(args: Namespace) -> None:
    """The agreement of student and teacher on the validation and the held-out stories."""
    model, tokenizer = load(args.out)
    encoders = common.ShownRunner(accelerate(model), tokenizer, batch_size=128), load_teacher(args.teacher)
    stories, lines = common.read_stories(args.stories), []
    cut = len(stories) - args.validation
    for name, unseen in (("validation", stories[cut:]), ("held-out", common.read_stories(args.heldout))):
        lines += comparison(name, encoders, unseen) if unseen else []
    common.fill_card(args, model, stories=cut, teacher=TEACHER_SHA256, comparison="\n".join(lines))
