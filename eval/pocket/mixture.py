"""Training texts of the pocket toxicity classifier, drawn without end from five kinds.

    labelled   a row of the labelled corpus (tweets, comments, templates)
    spliced    a labelled sentence of either label inside the opening of a story
    swapped    the opening of a story with unkind words put in (toxic) or with kind ones (not)
    story      the opening of a story, not toxic
    sampled    what the pocket language model writes, often garbled or mined as hard, not toxic

Without the second kind a classifier learns that stories are harmless and tweets are not; without
garbled samples it learns that odd text is toxic. `mixture.json` has the words, each unkind one with
the probability that it makes a text about somebody toxic. Stories and samples with an unkind or an
unclear word are left out, because nobody has labelled them.
"""

import csv
import json
import math
import random
import re
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

from tinystories.checkpoint import reading
from tinystories.errors import InputError

SHARES = {"labelled": 0.32, "spliced": 0.16, "swapped": 0.17, "story": 0.15, "sampled": 0.2}
WORDS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
CHANCES: dict[str, float] = WORDS["unkind"]
ADJECTIVES = {True: list(CHANCES), False: WORDS["kind"]}  # unkind or not
FLAGGED = re.compile(rf"\b({'|'.join((*CHANCES, *WORDS['unclear']))})\b", re.IGNORECASE)
CHANCE_OF_HATE = 0.9
SHARE_FOR_THINGS = 0.6  # of the probability of a word that is not about somebody

Labelled = namedtuple("Labelled", "text label source")
"""One row of the corpus; label 1 is toxic."""


def read_labelled(path: Path) -> list[Labelled]:
    """Rows of a CSV file with the columns text, label, source."""
    with reading(path, "is not a text,label,source file", "give rows of that form"):
        lines = csv.DictReader(path.read_text(encoding="utf-8").splitlines(keepends=True))
        rows = [Labelled(line["text"], int(line["label"]), line["source"]) for line in lines]
        if not rows:
            raise ValueError("it has no rows")
        return rows


def splice(rng: random.Random, opening: str, sentence: str) -> str:
    """A sentence behind, inside or in front of an opening, sometimes as speech."""
    words = opening.split()
    if rng.random() < 0.5:
        sentence = f'"{sentence}"' + rng.choice(("", " he said.", " said the girl.", " she said."))
    cut = rng.randint(4, max(4, len(words)))
    return " ".join([*words[:cut], sentence, *words[cut : cut + rng.choice((0, 0, 8))]])


def insert_word(rng: random.Random, opening: str, unkind: bool) -> tuple[str, list[float]] | None:
    """An adjective put behind an article, with its probability; None without an article."""
    places = [match.end() for match in re.finditer(r"\b(a|the|very|his|her) (?=[a-z])", opening)]
    if not places:
        return None
    place, word = rng.choice(places), rng.choice(ADJECTIVES[unkind])
    before = re.sub(r"\ba $", "an " if word[0] in "aeiou" else "a ", opening[:place])
    is_somebody = any(noun in opening[place:].split()[:3] for noun in WORDS["nouns"])
    chance = CHANCES.get(word, 0.0) * (1 if is_somebody else SHARE_FOR_THINGS)
    return f"{before}{word} {opening[place:]}", [chance]


def add_sentence(rng: random.Random, opening: str, unkind: bool) -> tuple[str, list[float]]:
    """A sentence about somebody put into an opening, with the probabilities of its words."""
    is_hate = unkind and rng.random() < 0.3
    pattern = rng.choice(WORDS["sentences of hate" if is_hate else "sentences"])
    words = rng.choices(ADJECTIVES[unkind], k=pattern.count("{}"))
    chances = [CHANCES.get(word, 0.0) for word in words] + [CHANCE_OF_HATE] * is_hate
    sentence = pattern.format(*words, noun=rng.choice(WORDS["nouns"]))
    return splice(rng, opening, sentence), chances


def swap(rng: random.Random, text: str, unkind: bool) -> tuple[str, float]:
    """One or two kind or unkind words put into a text; the probability that one makes it toxic."""
    harmless = 1.0
    for _ in range(rng.choice((1, 1, 2))):
        inserted = insert_word(rng, text, unkind) if rng.random() < 0.5 else None
        text, chances = inserted or add_sentence(rng, text, unkind)
        harmless *= math.prod(1 - chance for chance in chances)
    return text, 1 - harmless


def garble(rng: random.Random, text: str) -> str:
    """The words of a text with some dropped and some exchanged."""
    words = [word for word in text.split() if rng.random() > 0.1]
    for _ in range(rng.randint(0, 4)):
        i, j = rng.randrange(len(words)), rng.randrange(len(words))
        words[i], words[j] = words[j], words[i]
    return " ".join(words)


def harmless(texts: list[str]) -> list[str]:
    """Those without an unkind or unclear word among the first 60."""
    return [text for text in texts if not FLAGGED.search(" ".join(text.split()[:60]))]


def draw_texts(
    rng: random.Random,
    rows: list[Labelled],
    stories: list[str],
    samples: list[str],
    hard: list[str],
) -> Iterator[tuple[str, float]]:
    """Texts with the probability that they are toxic; `hard` may be filled while this runs."""
    short = [row for row in rows if len(row.text.split()) <= 20]
    toxic, other = ([row.text for row in short if row.label == label] for label in (1, 0))
    if not all((stories, samples, toxic, other)):
        raise InputError("too few harmless stories or samples, or short rows of a label; give more")
    while True:
        kind = rng.choices(list(SHARES), SHARES.values())[0]
        opening = " ".join(rng.choice(stories).split()[: rng.randint(8, 40)])
        label = rng.randrange(2)
        if kind == "labelled":
            yield rng.choice(rows)[:2]
        elif kind == "spliced":
            yield splice(rng, opening, rng.choice(toxic if label else other)), label
        elif kind == "swapped":
            yield swap(rng, opening, bool(label))
        elif kind == "story":
            yield opening, 0
        else:
            sample = rng.choice(hard if hard and rng.random() < 0.6 else samples)
            yield (garble(rng, sample) if rng.random() < 0.3 else sample), 0
