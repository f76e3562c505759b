"""The potential of sad stories: `--potential docs/sad.py:log_phi`.

    phi(s) = exp(-10 (1 + compound(s)))

compound, from -1 to 1, is how positive VADER finds a text (Hutto and Gilbert, 2014): it adds up
words of a lexicon and minds negation. `pip install nltk-vader-sentiment==1.0.0` (Apache-2.0; it
brings its lexicon and needs nothing else). phi of a text without such words is e^-10.
"""

try:
    from vader import polarity_scores
except ImportError as error:
    raise ImportError("pip install nltk-vader-sentiment==1.0.0") from error


def log_phi(texts: list[str]) -> list[float]:
    """log phi [N] of N texts, from -20 to 0; some 9,000 texts a second."""
    return [-10 * (1 + polarity_scores(text)["compound"]) for text in texts]
