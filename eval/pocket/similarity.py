"""The pocket sentence encoder: distilled from all-MiniLM-L6-v2 and compared with it.

    loss = mean over pairs i != j of a batch of (e_i . e_j - E_i . E_j)^2

e [B, D] are the unit vectors of the student, E [B, 384] those of the teacher: the student learns
the cosines and may choose its own axes. The last --validation stories are not trained on.
B texts of a batch, T tokens, N texts, D width, V words.
"""

from argparse import Namespace

import torch
from tokenizers import BertWordPieceTokenizer, Tokenizer
from torch import Tensor

from eval.pocket.lm import PROMPT, fit, read_stories
from eval.scorers.encoder import EncoderConfig, Runner
from eval.scorers.similarity import SentenceEncoder, load, save
from tinystories.errors import InputError

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def train_tokenizer(stories: list[str], vocab_size: int) -> Tokenizer:
    """Lower-case WordPiece that puts [CLS] before and [SEP] behind a text."""
    trained = BertWordPieceTokenizer()
    characters = {character for story in stories for character in trained.normalize(story)}
    # The trainer breaks ties by the numbers of the characters inside words, which it takes from a
    # hash map. Special tokens have one order, so that equal stories give equal tokenizers.
    inside = [f"##{character}" for character in sorted(characters) if character.isalnum()]
    trained.train_from_iterator(stories, vocab_size, 0, special_tokens=SPECIAL + inside)
    return Tokenizer.from_str(BertWordPieceTokenizer(trained.get_vocab()).to_str())


def draw_openings(stories: list[str], count: int, generator: torch.Generator) -> list[str]:
    """Openings of any story, of stories that begin with the prompt, and two grafts, in turn."""
    whole = [story.split() for story in stories]
    prompted = [words for words in whole if " ".join(words).startswith(PROMPT + " ")]
    # A graft is the prompt, continued by words that follow "a" inside a story: there are many more.
    places = [(words, at) for words in whole for at in range(7, len(words) - 20)]
    grafts = [PROMPT.split() + words[at + 1 : at + 31] for words, at in places if words[at] == "a"]
    if not prompted or not grafts:
        raise InputError(f"--stories: none opens with {PROMPT!r}, or all are short; give others")
    kinds = ((whole, 8, 40), (prompted, 20, 30), (grafts, 20, 30), (grafts, 20, 30))
    texts = []
    for index in range(count):
        source, shortest, longest = kinds[index % 4]
        words = source[int(torch.randint(len(source), (), generator=generator))]
        length = int(torch.randint(shortest, longest + 1, (), generator=generator))
        texts.append(" ".join(words[:length]))
    return texts


def initialise(run: Runner, teacher: Runner, generator: torch.Generator) -> None:
    """The teacher's word vectors, cut to their leading directions; normal matrices, zero biases."""
    table = teacher.model.embeddings.word_embeddings.weight.detach()  # [V_teacher, 384]
    names = sorted(run.tokenizer.get_vocab(), key=run.tokenizer.token_to_id)
    names = [name.removeprefix("##") or name for name in names]
    pieces = teacher.tokenizer.encode_batch(names, add_special_tokens=False)
    # A word of the student starts as the mean of the pieces that the teacher has for it.
    words = torch.stack([table[piece.ids].mean(0) for piece in pieces])  # [V, 384]
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

    fit(run.model, args, loss_of)


def agreement(student: Runner, teacher: Runner, stories: list[str]) -> float:
    """Pearson correlation of the encoders' cosines over all pairs of openings of 25 words."""
    texts = [" ".join(story.split()[:25]) for story in stories]
    upper = torch.ones(len(texts), len(texts)).triu(1).bool()
    cosines = [(unit @ unit.T)[upper] for unit in (student(texts), teacher(texts))]  # [pairs] each
    return torch.corrcoef(torch.stack(cosines).double())[0, 1].item()


def make(args: Namespace, generator: torch.Generator) -> dict:
    """Write the checkpoint and return how its cosines agree with those of the teacher."""
    model, tokenizer = load(args.teacher)
    teacher = Runner(model, tokenizer, batch_size=128)
    stories, heldout = read_stories(args.stories), read_stories(args.heldout)
    cut = len(stories) - args.validation
    tokenizer = train_tokenizer(stories[:cut], args.vocab_size)
    texts = draw_openings(stories[:cut], args.openings, generator)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        targets = teacher(texts)  # [N, 384]
    sizes = (tokenizer.get_vocab_size(), args.width, args.layers, args.heads, 4 * args.width)
    student = SentenceEncoder(EncoderConfig(*sizes, args.positions, type_vocab_size=2))
    run = Runner(student, tokenizer, args.rows)
    initialise(run, teacher, generator)
    train(run, texts, targets, args, generator)
    save(args.out, student, tokenizer, torch.float16)
    run = Runner(load(args.out)[0], tokenizer, batch_size=128)
    return {
        "pearson_validation": agreement(run, teacher, stories[cut:]),
        "pearson_heldout": agreement(run, teacher, heldout),
    }
