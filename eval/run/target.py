"""Exact samples of the target sigma on disk: `samples.safetensors` and `target.json`, as in `checkpoints/pocket/target`.

    sigma(s) = p^(0)(s) phi(s) / Z_sigma (eq. 2),   drawn by rejection (`tsmc/rejection.py`)

`target.json` names the fingerprints of the language model and of the classifier that made them; samples of other checkpoints
are of another sigma, so stale files are refused. N samples, T tokens.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from tinystories.checkpoint import fingerprint, read_json, read_tensors, write_json, write_tensors
from tinystories.errors import InputError
from tsmc.rejection import ExactSamples

REMAKE = "make it anew with python -m eval.pocket target"


@dataclass(frozen=True)
class TargetKey:
    """What sigma depends on."""

    lm: str  # fingerprint
    toxicity: str  # fingerprint
    prompt: str
    length: int
    beta: float
    potential: list[str] = field(default_factory=lambda: ["toxicity"])  # factors, a user's file by its hash


def target_key(
    lm: Path, classifier: Path, prompt: str, length: int, beta: float, potential: Sequence[str] = ("toxicity",)
) -> TargetKey:
    """The key of the sigma that these checkpoints and options define."""
    return TargetKey(fingerprint(lm), fingerprint(classifier), prompt, length, beta, list(potential))


def save_target(directory: Path, exact: ExactSamples, key: TargetKey, **notes) -> None:
    """Write `samples.safetensors` and `target.json`, with `notes` beside the numbers."""
    tensors = {"tokens": exact.tokens.to(torch.int32), "log_phi": exact.log_phi.float()}
    write_tensors(directory / "samples.safetensors", tensors)
    numbers = {
        "num_samples": len(exact.tokens),
        "num_proposals": exact.num_proposals,
        "log_z": exact.log_z,
        "log_z_std_error": exact.log_z_std_error,
    }
    write_json(directory / "target.json", {"key": asdict(key), **numbers, **notes})


def load_target(directory: Path, key: TargetKey) -> ExactSamples | None:
    """The samples, or None where they belong to other options (prompt, length, beta, potential).

    InputError where they belong to other checkpoints than `key` names, or where the two files do not fit each other.
    """
    path = Path(directory) / "target.json"
    raw = read_json(path)
    try:
        made_for = TargetKey(**raw["key"])
        numbers = {name: raw[name] for name in ("num_proposals", "log_z", "log_z_std_error")}
        count = raw["num_samples"]
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: not a target file ({error!r}); {REMAKE}") from error
    for role in ("lm", "toxicity"):
        if getattr(made_for, role) != getattr(key, role):
            raise InputError(f"{path}: stale, it was made for another {role} checkpoint; {REMAKE}")
    if made_for != key:
        return None
    tensors = read_tensors(path.with_name("samples.safetensors"))
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if shapes != {"tokens": [count, key.length], "log_phi": [count]}:
        raise InputError(f"{path.with_name('samples.safetensors')}: does not fit target.json; {REMAKE}")
    return ExactSamples(tokens=tensors["tokens"].long(), log_phi=tensors["log_phi"], **numbers)
