"""Training texts of the pocket toxicity classifier, drawn without end from five kinds.

    labelled   a row of the labelled corpus (tweets, comments, templates), as it is
    spliced    a labelled sentence, of either label, inside a story opening: what an insult looks like in a story
    swapped    a story opening with unkind words put in (toxic, the more the surer) or with kind ones (not)
    story      an opening of a story, non-toxic
    sampled    what the pocket language model writes, garbled texts among it, non-toxic; once `hard` is filled, often
               one of those that the half-trained classifier wrongly scored highest

Without the splices a classifier learns that stories are harmless and tweets are not; without the garbled samples it
learns that odd text is toxic. The words are in `mixture.json`, each unkind one with the chance that it makes a text
about somebody toxic. Stories and samples that hold an unclear or unkind word are left out: nobody has read them, so
they say nothing about unkindness.
"""

import csv
import json
import math
import random
import re
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

from tinystories.errors import InputError

SHARES = {"labelled": 0.32, "spliced": 0.16, "swapped": 0.17, "story": 0.15, "sampled": 0.2}
WORDS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
CHANCES: dict[str, float] = WORDS["unkind"]
ADJECTIVES = {True: list(CHANCES), False: WORDS["kind"]}  # unkind or not
FLAGGED = re.compile(rf"\b({'|'.join((*CHANCES, *WORDS['unclear']))})\b", re.IGNORECASE)
CHANCE_OF_HATE = 0.9
SHARE_FOR_THINGS = 0.6  # of a word's chance, where it is not about somebody

Labelled = namedtuple("Labelled", "text label source")
"""One row of the corpus; label 1 is toxic."""


def read_labelled(path: Path) -> list[Labelled]:
    """Rows of a `text,label,source` file; InputError names it where it is of another form or empty."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = [Labelled(row["text"], int(row["label"]), row["source"]) for row in csv.DictReader(file)]
            if not rows:
                raise ValueError("no rows")
            return rows
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise InputError(f"{path}: not a text,label,source file ({error!r}); see --help") from error


def splice(rng: random.Random, opening: str, sentence: str) -> str:
    """A labelled sentence behind, inside or in front of a story opening, sometimes as speech."""
    words = opening.split()
    if rng.random() < 0.5:
        sentence = f'"{sentence}"' + rng.choice(("", " he said.", " said the girl.", " she said."))
    cut = rng.randint(4, max(4, len(words)))
    return " ".join([*words[:cut], sentence, *words[cut : cut + rng.choice((0, 0, 8))]])


def insert_word(rng: random.Random, opening: str, unkind: bool) -> tuple[str, float] | None:
    """An adjective behind an article, and how toxic that makes the text; None where the opening has no article."""
    places = [match.end() for match in re.finditer(r"\b(a|the|very|his|her) (?=[a-z])", opening)]
    if not places:
        return None
    place, word = rng.choice(places), rng.choice(ADJECTIVES[unkind])
    before = re.sub(r"\ba $", "an " if word[0] in "aeiou" else "a ", opening[:place])
    somebody = any(noun in opening[place:].split()[:3] for noun in WORDS["nouns"])
    return f"{before}{word} {opening[place:]}", CHANCES.get(word, 0.0) * (1 if somebody else SHARE_FOR_THINGS)


def add_sentence(rng: random.Random, opening: str, unkind: bool) -> tuple[str, float]:
    """A sentence that says something of somebody, and how toxic that makes the text."""
    hate = unkind and rng.random() < 0.3
    pattern = rng.choice(WORDS["sentences of hate" if hate else "sentences"])
    words = rng.choices(ADJECTIVES[unkind], k=pattern.count("{}"))
    chances = [CHANCES.get(word, 0.0) for word in words] + [CHANCE_OF_HATE] * hate
    chance = 1 - math.prod(1 - each for each in chances)  # that at least one of independent judgements is "toxic"
    return splice(rng, opening, pattern.format(*words, noun=rng.choice(WORDS["nouns"]))), chance


def swap(rng: random.Random, opening: str, unkind: bool) -> tuple[str, float]:
    """One or two kind or unkind words put into an opening, and the probability with which it counts as toxic."""
    text, chances = opening, []
    for _ in range(rng.choice((1, 1, 2))):
        done = insert_word(rng, text, unkind) if rng.random() < 0.5 else None
        text, chance = done or add_sentence(rng, text, unkind)
        chances.append(chance)
    return text, 1 - math.prod(1 - chance for chance in chances)


def garble(rng: random.Random, text: str) -> str:
    """The same words with some dropped, doubled or out of order."""
    words = [word for word in text.split() if rng.random() > 0.1]
    for _ in range(rng.randint(0, 4)):
        i, j = rng.randrange(len(words)), rng.randrange(len(words))
        words[i], words[j] = words[j], words[i]
    return " ".join(words)


def harmless(texts: list[str]) -> list[str]:
    """Those without an unkind or unclear word among the first 60."""
    return [text for text in texts if not FLAGGED.search(" ".join(text.split()[:60]))]


def draw_texts(
    rng: random.Random, labelled: list[Labelled], stories: list[str], samples: list[str], hard: list[str]
) -> Iterator[tuple[str, float]]:
    """Text and probability that it is toxic; stories and samples are harmless, `hard` may fill up meanwhile."""
    short = [row for row in labelled if len(row.text.split()) <= 20]
    toxic, other = ([row.text for row in short if row.label == label] for label in (1, 0))
    if not all((stories, samples, toxic, other)):
        raise InputError("too few harmless stories, harmless samples or short rows of either label; give more")
    while True:
        kind = rng.choices(list(SHARES), SHARES.values())[0]
        opening = " ".join(rng.choice(stories).split()[: rng.randint(8, 40)])
        label = rng.randrange(2)
        if kind == "labelled":
            yield rng.choice(labelled)[:2]
        elif kind == "spliced":
            yield splice(rng, opening, rng.choice(toxic if label else other)), label
        elif kind == "swapped":
            yield swap(rng, opening, bool(label))
        elif kind == "story":
            yield opening, 0
        else:
            sample = rng.choice(hard if hard and rng.random() < 0.6 else samples)
            yield (garble(rng, sample) if rng.random() < 0.3 else sample), 0
