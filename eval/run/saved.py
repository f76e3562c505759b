"""The pairs (p^(m), psi^(m)) that a run has saved, read again.

generations(run)                                 directories of the saved pairs by m
load_generation(given, directory, m, device)     sigma after each prompt as p^(m) sees it, and psi^(m)
"""

from pathlib import Path

import torch

import tinystories
from eval.run.setup import Ingredients
from tinystories import InputError
from tsmc.sampler import Sigma
from twist import TwistMLP, load_twist
from twist.checkpoint import FILE


def generations(run: Path) -> dict[int, Path]:
    """Directory of every generation that is saved whole, the twist being its last file; InputError where there is none."""
    numbered = (path for path in run.glob("generation-*") if path.name[11:].isdecimal() and (path / FILE).is_file())
    found = {int(path.name[11:]): path for path in numbered}
    if not found:
        raise InputError(f"{run}: holds no saved generation; name a run of main.py that has finished one")
    return dict(sorted(found.items()))


def load_generation(given: Ingredients, directory: Path, m: int, device: torch.device) -> tuple[list[Sigma], TwistMLP]:
    """Sigma after each prompt, through phi itself at m = 0, and the twist; the model in the type of p^(0) as it was loaded.

    InputError names the file that does not fit.
    """
    twist = load_twist(directory, device)
    if m == 0:
        return given.sigmas(), twist
    model, _ = tinystories.load(directory, device)
    return given.sigmas(model.to(given.model.wte.weight.dtype)), twist
