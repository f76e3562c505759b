"""Training texts of the pocket toxicity classifier, drawn without end from five kinds.

    labelled   a row of the labelled corpus (tweets, comments, templates), as it is
    spliced    a labelled sentence, of either label, inside a story opening: what an insult looks like in a story
    swapped    a story opening with unkind words put in (toxic, the more the surer) or with kind ones (not)
    story      an opening of a story, non-toxic
    sampled    what the pocket language model writes, garbled texts among it, non-toxic; once `hard` is filled, often one
               of those that the half-trained classifier wrongly scored highest

The corpora are tweets and comments. Without the splices a classifier learns that stories are harmless and tweets are not;
without the garbled samples it learns that odd text is toxic. The words are in `mixture.json`, each unkind one with how surely
it makes a text about somebody toxic. Openings and samples that hold an unclear or unkind word are kept out of the non-toxic
kinds: nobody has read them, so they say nothing about unkindness.
"""

import csv
import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tinystories.errors import InputError

SHARES = {"labelled": 0.32, "spliced": 0.16, "swapped": 0.17, "story": 0.15, "sampled": 0.2}
WORDS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
CHANCES: dict[str, float] = WORDS["unkind"]  # that a text about somebody is toxic
FLAGGED = re.compile(rf"\b({'|'.join((*CHANCES, *WORDS['unclear']))})\b", re.IGNORECASE)
ADJECTIVES = {True: list(CHANCES), False: WORDS["kind"]}
SEVERITY_OF_HATE = 0.9
SHARE_FOR_THINGS = 0.6  # of a word's chance where nobody is meant


@dataclass(frozen=True)
class Labelled:
    """One row of the corpus; label 1 is toxic."""

    text: str
    label: int
    source: str


def read_labelled(path: Path) -> list[Labelled]:
    """Rows of a `text,label,source` file; InputError names it where it is absent, empty or of another form."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = [Labelled(row["text"], int(row["label"]), row["source"]) for row in csv.DictReader(file)]
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise InputError(f"{path}: not a text,label,source file ({error!r}); see --help") from error
    if {row.label for row in rows} != {0, 1}:
        raise InputError(f"{path}: needs rows of label 0 and of label 1; give a larger file")
    return rows


def any_of(chances: list[float]) -> float:
    """Probability that at least one of independent events happens."""
    return 1 - math.prod(1 - chance for chance in chances)


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
    severity = any_of([CHANCES.get(word, 0.0) for word in words] + [SEVERITY_OF_HATE] * hate)
    return splice(rng, opening, pattern.format(*words, noun=rng.choice(WORDS["nouns"]))), severity


def swap(rng: random.Random, opening: str, unkind: bool) -> tuple[str, float]:
    """One or two kind or unkind words put into an opening, and the probability with which it counts as toxic."""
    text, severities = opening, []
    for _ in range(rng.choice((1, 1, 2))):
        done = insert_word(rng, text, unkind) if rng.random() < 0.5 else None
        text, severity = done or add_sentence(rng, text, unkind)
        severities.append(severity)
    return text, any_of(severities)


def garble(rng: random.Random, text: str) -> str:
    """The same words with some dropped, doubled or out of order."""
    words = [word for word in text.split() if rng.random() > 0.1]
    for _ in range(rng.randint(0, 4)):
        i, j = rng.randrange(len(words)), rng.randrange(len(words))
        words[i], words[j] = words[j], words[i]
    return " ".join(words)


@dataclass(frozen=True)
class Mixture:
    """The texts that each kind is drawn from."""

    labelled: list[Labelled]
    stories: list[str]
    samples: list[str]
    hard: list[str] = field(default_factory=list)

    def harmless_samples(self) -> list[str]:
        """Samples without an unkind or unclear word."""
        return [sample for sample in self.samples if not FLAGGED.search(sample)]

    def draw(self, rng: random.Random) -> Iterator[tuple[str, float]]:
        """Text and probability that it is toxic, without end."""
        harmless = [story for story in self.stories if not FLAGGED.search(" ".join(story.split()[:60]))]
        samples = self.harmless_samples()
        short = [row for row in self.labelled if len(row.text.split()) <= 20]
        toxic, other = ([row for row in short if row.label == label] for label in (1, 0))
        if not all((harmless, samples, toxic, other)):
            raise InputError("too few harmless stories, samples or short labelled rows; give more of each")
        while True:
            kind = rng.choices(list(SHARES), SHARES.values())[0]
            opening = " ".join(rng.choice(harmless).split()[: rng.randint(8, 40)])
            label = rng.randrange(2)
            if kind == "labelled":
                row = rng.choice(self.labelled)
                yield row.text, row.label
            elif kind == "spliced":
                yield splice(rng, opening, rng.choice(toxic if label else other).text), label
            elif kind == "swapped":
                yield swap(rng, opening, bool(label))
            elif kind == "story":
                yield opening, 0
            else:
                sample = rng.choice(self.hard if self.hard and rng.random() < 0.6 else samples)
                yield (garble(rng, sample) if rng.random() < 0.3 else sample), 0
