"""The genealogy of the particles as one page of HTML that needs nothing else: `python -m tsmc RUN --html FILE`.

The page is `genealogy.html` with the trace in it as JSON. [T][K] lists hold a row a step, rounded, null for minus infinity:

    tokens        place of s_t in `vocabulary`, before step t's resampling       log_psi, log_w, log_weights   as in the trace
    ancestors     drawn at the end of step t: particle k of step t + 1 continues ancestors[t][k]

Everything else is read off these in the browser: lineages, quantiles, the order of the rows.
"""

import json
import math
from pathlib import Path

from tokenizers import Tokenizer

from eval.viewer.draws import Draws

TEMPLATE = Path(__file__).with_name("genealogy.html")
PLACE = "{{data}}"


def rounded(values: list | float, digits: int = 2) -> list | float | None:
    """Nested lists of numbers, short enough for a page; None for what is not finite."""
    if isinstance(values, list):
        return [rounded(value, digits) for value in values]
    return round(values, digits) if math.isfinite(values) else None


def population_data(draws: Draws, tokenizer: Tokenizer) -> dict:
    """What the page shows of one prompt."""
    trace = draws.trace
    tokens = trace.tokens[:, 0].tolist()  # [T][K]
    vocabulary = sorted({token for step in tokens for token in step})
    place = {token: i for i, token in enumerate(vocabulary)}
    named = ("text", "weight", "copies", "log_phi", "score")
    numbers = {name: rounded(getattr(trace, name)[:, 0].tolist()) for name in ("log_psi", "log_w", "log_weights")}
    return {
        "prompt": draws.prompt,
        "log_z_hat": rounded(draws.population.log_mean_z(), 3),
        "vocabulary": [tokenizer.decode([token], skip_special_tokens=False) for token in vocabulary],
        "tokens": [[place[token] for token in step] for step in tokens],
        **numbers,
        "ess": rounded(trace.ess[:, 0].tolist()),
        "ancestors": trace.ancestors[:, 0].tolist(),
        "distinct": [
            [value if isinstance(value, str) else rounded(value, 4) for value in (getattr(row, name) for name in named)]
            for row in draws.distinct
        ],
    }


def page(drawn: list[Draws], about: dict, tokenizer: Tokenizer) -> str:
    """The page of the populations after one or more prompts; `about` names the generation, K, T, the seed and the options."""
    data = {"about": about, "populations": [population_data(draws, tokenizer) for draws in drawn]}
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    safe = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return TEMPLATE.read_text(encoding="utf-8").replace(PLACE, safe)
