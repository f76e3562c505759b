"""The potential of a question: `--potential docs/question.py:log_phi`.

    phi(s) = 1 where s has a question mark, else exp(-12 + 3 [s has a question word])

It rewards a text that asks. A question word alone, as in "a girl who", is worth e^3 of its absence.
"""

import re

WORDS = re.compile(r"\b(who|what|when|where|why|how|which|whose)\b", re.IGNORECASE)


def log_phi(texts: list[str]) -> list[float]:
    """log phi [N] of N texts: 0, -9 or -12."""
    return [0.0 if "?" in text else -9.0 if WORDS.search(text) else -12.0 for text in texts]
