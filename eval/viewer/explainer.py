"""The data of `docs/explainer.html`: `python -m eval.viewer.explainer` replaces it inside the page.

The page runs the sampler in the world of `docs/tiny.py`, whose random log p^(0) is rounded before
Algorithm 1 runs on it. N prefixes can grow, V letters, T steps. It gets of each generation m

    rows     the prefixes whose row of p^(m) differs from that of p^(m-1); null for all prefixes
    log_p    one character for each log p^(m)(s_t | s_{1:t-1}) of these rows: its index in ALPHABET
             is -SCALE log p, rounded
    log_psi  [T][V][V] log psi^(m) by step, previous letter (one row at t = 1) and letter
"""

import importlib.util
import json
import string
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from tinystories.checkpoint import write_text
from tsmc.exact import all_sequences

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "explainer.html"
BEGIN = '<script type="application/json" id="data">\n'
ALPHABET = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+-"
SCALE = 8.75  # the finest grid that holds every log p


def load_tiny() -> ModuleType:
    """`docs/tiny.py`, which is in no package."""
    spec = importlib.util.spec_from_file_location("tiny", DOCS / "tiny.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rounded(log_p: Tensor) -> Tensor:
    """Indices in ALPHABET [N, V] of log probabilities [N, V]."""
    return (-SCALE * log_p).round().long().clamp(max=len(ALPHABET) - 1)


def world_data() -> dict:
    """The world of `docs/tiny.py` and all generations of Algorithm 1 in it."""
    tiny = load_tiny()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(tiny.N, tiny.V, dtype=torch.float64, generator=generator)
    codes = rounded(logits.log_softmax(-1))  # [N, V]
    words = all_sequences(tiny.V, tiny.T)  # [V^T, T]
    broken = (words != words.flip(1)).sum(1).double() / 2  # each pair is counted twice
    algorithm = tiny.self_distilled_tsmc(-codes.double() / SCALE, -tiny.BETA * broken, generator)
    generations = []
    for m, (log_p, log_psi, *_) in enumerate(algorithm):
        own = codes if m == 0 else rounded(tiny.children(log_p))
        rows = None if m == 0 else (own != codes).any(1).nonzero()[:, 0].tolist()
        listed = own if rows is None else own[rows]
        text = "".join(ALPHABET[code] for code in listed.flatten().tolist())
        codes = own
        steps = tiny.children(log_psi).split(tiny.COUNTS[:-1])  # T of [V^t, V]
        # The first V prefixes of a step end in the V letters.
        twist = [step[: tiny.V].round(decimals=3).tolist() for step in steps]
        generations.append({"rows": rows, "log_p": text, "log_psi": twist})
    about = {"letters": tiny.V, "length": tiny.T, "beta": tiny.BETA}
    return about | {"alphabet": ALPHABET, "scale": SCALE, "generations": generations}


def page(data: dict) -> str:
    """The page that exists, with other data."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return before + BEGIN + text + rest[rest.index("\n</script>") :]


if __name__ == "__main__":
    write_text(PAGE, page(world_data()))
