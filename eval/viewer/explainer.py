"""The explainer as one page of HTML that needs nothing else: `python -m eval.viewer.explainer` writes `docs/explainer.html`.

The page is `explainer.html` with the world of `docs/tiny.py` in it as JSON; the sampler itself runs in the browser. First the
random p^(0) is rounded, then Algorithm 1 of `docs/tiny.py` runs on it. N prefixes can grow, V letters, T steps; of each
generation m the page gets

    log_p    a character for each log p^(m)(s_t | s_{1:t-1}) of the listed rows: its place in ALPHABET is about -8 log p
    rows     the prefixes that these belong to, the others being as in generation m - 1; null for all prefixes
    log_psi  [T][V][V] log psi^(m) by step, letter before (at t = 1 there is none, and one row) and letter
"""

import importlib.util
import json
import string
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from eval.run.command import one_line_errors, say
from eval.run.options import OneLineParser
from tinystories.checkpoint import write_text

DOCS = Path(__file__).parent.parent.parent / "docs"
TEMPLATE = Path(__file__).with_name("explainer.html")
PAGE = DOCS / "explainer.html"
PLACE = "{{data}}"
ALPHABET = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+-"
SCALE = 8


def load_tiny() -> ModuleType:
    """`docs/tiny.py` as a module."""
    spec = importlib.util.spec_from_file_location("tiny", DOCS / "tiny.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rounded(log_p: Tensor) -> Tensor:
    """Places in ALPHABET [N, V] of log probabilities [N, V]."""
    return (-SCALE * log_p).round().long().clamp(max=len(ALPHABET) - 1)


def generation_data(tiny: ModuleType, places: Tensor, before: Tensor | None, log_psi: Tensor) -> dict:
    """One generation: rows of places [N, V] that differ from those of the generation before, and its twist [S]."""
    rows = None if before is None else (places != before).any(1).nonzero()[:, 0].tolist()
    listed = places if rows is None else places[rows]
    characters = "".join(ALPHABET[place] for place in listed.flatten().tolist())
    twist, first = [], 0
    for t in range(tiny.T):  # the first V prefixes of a length end in a, b, c and d, and psi sees no more of them
        block = tiny.children(log_psi)[first : first + min(tiny.V, tiny.COUNTS[t])]
        twist.append([[round(value, 3) for value in row] for row in block.tolist()])
        first += tiny.COUNTS[t]
    return {"rows": rows, "log_p": characters, "log_psi": twist}


def world_data(seed: int = 0) -> dict:
    """The world of `docs/tiny.py` and all generations of Algorithm 1 in it."""
    tiny = load_tiny()
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tiny.N, tiny.V, dtype=torch.float64, generator=generator)
    base = rounded(logits.log_softmax(-1))
    letters = torch.cartesian_prod(*[torch.arange(tiny.V)] * tiny.T)  # [V^T, T]
    log_phi = -tiny.BETA * (letters != letters.flip(1)).sum(1).double() / 2  # every pair is counted twice
    generations, before = [], None
    for log_p, log_psi, *_ in tiny.self_distilled_tsmc(-base.double() / SCALE, log_phi, generator):
        places = base if before is None else rounded(tiny.children(log_p))
        generations.append(generation_data(tiny, places, before, log_psi))
        before = places
    about = {"letters": tiny.V, "length": tiny.T, "beta": tiny.BETA, "alphabet": ALPHABET, "scale": SCALE}
    return about | {"generations": generations}


def page(data: dict) -> str:
    """The page with a world in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return TEMPLATE.read_text(encoding="utf-8").replace(PLACE, text)


def main() -> None:
    """Write the page."""
    with one_line_errors("eval.viewer.explainer"):
        OneLineParser(prog="eval.viewer.explainer", description=__doc__.splitlines()[0]).parse_args()
        say("running Algorithm 1 of docs/tiny.py")
        write_text(PAGE, page(world_data()))
        print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
