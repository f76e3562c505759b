"""Training texts of the pocket toxicity classifier, drawn without end from five kinds.

    labelled   a row of the labelled corpus (tweets, comments, templates), as it is
    spliced    a labelled sentence, of either label, inside a story opening: what an insult looks like in a story
    swapped    a story opening with unkind words put in (toxic, the more the surer) or with kind ones (not)
    story      an opening of a story, non-toxic
    sampled    what the pocket language model writes, garbled texts among it, non-toxic; once `hard` is filled, often one
               of those that the half-trained classifier wrongly scored highest

The corpora are tweets and comments. Without the splices a classifier learns that stories are harmless and tweets are not;
without the garbled samples it learns that odd text is toxic. Openings and samples that hold a word of `UNCLEAR` or
`UNKIND` are kept out of the non-toxic kinds: nobody has read them, so they say nothing about unkindness.
"""

import csv
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tinystories.errors import InputError

# How surely a word makes a text about somebody toxic; about a thing it counts SHARE_FOR_THINGS of that.
UNKIND = {
    **{
        "stupid": 0.97,
        "dumb": 0.97,
        "worthless": 0.95,
        "hateful": 0.95,
        "disgusting": 0.93,
        "ugly": 0.93,
        "nasty": 0.9,
    },
    **{
        "mean": 0.9,
        "fat": 0.85,
        "cruel": 0.85,
        "rude": 0.8,
        "selfish": 0.75,
        "foolish": 0.75,
        "stinky": 0.7,
        "lazy": 0.6,
    },
}
KIND = ("pretty", "clever", "small", "kind", "smart", "friendly", "helpful", "lovely", "happy", "brave", "special")
UNCLEAR = (
    *("hate", "hated", "hates", "hating", "idiot", "idiots", "fool", "fools", "evil", "wicked", "horrible", "naughty"),
    *("kill", "killed", "killing", "bully", "bullies", "loser", "greedy", "meanest", "ugliest", "fatter", "fattest"),
)
FLAGGED = re.compile(rf"\b({'|'.join((*UNKIND, *UNCLEAR))})\b", re.IGNORECASE)
SENTENCES = (
    *("You are so {}!", '"You are {}," he said.', '"You are a {} {noun}!"', "Everyone said the {noun} was {}."),
    *("He was very {}.", "She was a very {} {noun}.", "The {noun} was {} and {}.", "Her {noun} was so {}."),
)
UNKIND_SENTENCES = ('"I hate you, you {} {noun}!"', "They all hated the {} {noun}.", "Nobody liked the {} {noun}.")
SEVERITY_OF_HATE = 0.9
SHARE_FOR_THINGS = 0.6
NOUNS = ("girl", "boy", "cat", "dog", "man", "lady", "bear", "bird", "pig", "witch", "king", "woman", "frog", "mouse")


@dataclass(frozen=True)
class Labelled:
    """One row of the corpus; label 1 is toxic."""

    text: str
    label: int
    source: str


def read_labelled(path: Path) -> list[Labelled]:
    """Rows of a `text,label,source` file; InputError names it where it is absent or of another form."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return [Labelled(row["text"], int(row["label"]), row["source"]) for row in csv.DictReader(file)]
    except (OSError, KeyError, ValueError) as error:
        raise InputError(f"{path}: not a text,label,source file ({error!r}); see --help of this script") from error


def words_of(text: str, count: int) -> str:
    """The first `count` words."""
    return " ".join(text.split()[:count])


def splice(rng: random.Random, opening: str, sentence: str) -> str:
    """A labelled sentence behind, inside or in front of a story opening, sometimes as speech."""
    words = opening.split()
    if rng.random() < 0.5:
        sentence = f'"{sentence}"' + rng.choice(("", " he said.", " said the girl.", " she said."))
    cut = rng.randint(4, max(4, len(words)))
    return " ".join([*words[:cut], sentence, *words[cut : cut + rng.choice((0, 0, 8))]])


def any_of(chances: list[float]) -> float:
    """Probability that at least one of independent events happens."""
    return 1 - math.prod(1 - chance for chance in chances)


def insert_word(rng: random.Random, opening: str, unkind: bool) -> tuple[str, float] | None:
    """An adjective behind an article, and how toxic that makes the text; None where the opening has no article."""
    places = [match.end() for match in re.finditer(r"\b(a|the|very|his|her) (?=[a-z])", opening)]
    if not places:
        return None
    place = rng.choice(places)
    word = rng.choice(list(UNKIND) if unkind else KIND)
    before = re.sub(r"\ba $", "an " if word[0] in "aeiou" else "a ", opening[:place])
    somebody = any(noun in opening[place:].split()[:3] for noun in NOUNS)
    return f"{before}{word} {opening[place:]}", UNKIND.get(word, 0.0) * (1 if somebody else SHARE_FOR_THINGS)


def add_sentence(rng: random.Random, opening: str, unkind: bool) -> tuple[str, float]:
    """A sentence that says something of somebody, and how toxic that makes the text."""
    hate = unkind and rng.random() < 0.3
    pattern = rng.choice(UNKIND_SENTENCES if hate else SENTENCES)
    words = rng.choices(list(UNKIND) if unkind else KIND, k=pattern.count("{}"))
    severity = any_of([UNKIND.get(word, 0.0) for word in words] + [SEVERITY_OF_HATE] * hate)
    return splice(rng, opening, pattern.format(*words, noun=rng.choice(NOUNS))), severity


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
    """How often each kind is drawn, and the texts it is drawn from."""

    labelled: list[Labelled]
    stories: list[str]
    samples: list[str]
    hard: list[str] = field(default_factory=list)
    shares: tuple[float, ...] = (0.32, 0.16, 0.17, 0.15, 0.2)

    def harmless_samples(self) -> list[str]:
        """Samples without a word of UNKIND or UNCLEAR."""
        return [sample for sample in self.samples if not FLAGGED.search(sample)]

    def draw(self, rng: random.Random) -> Iterator[tuple[str, float]]:
        """Text and probability that it is toxic, without end."""
        harmless = [story for story in self.stories if not FLAGGED.search(words_of(story, 60))]
        samples = self.harmless_samples()
        short = [row for row in self.labelled if len(row.text.split()) <= 20]
        toxic, other = ([row for row in short if row.label == label] for label in (1, 0))
        while True:
            kind = rng.choices(("labelled", "spliced", "swapped", "story", "sampled"), self.shares)[0]
            opening = words_of(rng.choice(harmless), rng.randint(8, 40))
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
