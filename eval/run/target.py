"""Exact samples of the target sigma on disk: `samples.safetensors` and `target.json`, as in `checkpoints/pocket/target`.

    sigma(s) = p^(0)(s) phi(s) / Z_sigma (eq. 2),   drawn by rejection (`tsmc/rejection.py`)

`target.json` names the fingerprints of the language model and of the classifier that made them; samples of other checkpoints
are of another sigma, so stale files are refused. It also has the sha256 of the samples. N samples, T tokens.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.run.state import digest_of
from tinystories.checkpoint import fingerprint, read_json, read_tensors, write_json, write_tensors
from tinystories.errors import InputError
from tsmc.rejection import ExactSamples

REMAKE = "make it anew with python -m eval.pocket target"
SAMPLES = "samples.safetensors"
KINDS = {"length": int, "beta": float, "potential": list, "num_samples": int, "num_proposals": int}
KINDS |= {"log_z": float, "log_z_std_error": float}  # all else is text


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
    write_tensors(directory / SAMPLES, tensors)
    numbers = {
        "num_samples": len(exact.tokens),
        "num_proposals": exact.num_proposals,
        "log_z": exact.log_z,
        "log_z_std_error": exact.log_z_std_error,
        "sha256": digest_of(directory / SAMPLES),
    }
    write_json(directory / "target.json", {"key": asdict(key), **numbers, **notes})


def load_target(directory: Path, key: TargetKey, vocab_size: int = 2**31) -> ExactSamples | None:
    """The samples, or None where they belong to other options (prompt, length, beta, potential).

    InputError where they belong to other checkpoints than `key` names, where a file holds what cannot be, such as tokens
    beyond the vocabulary, or where the two files do not fit each other.
    """
    path = Path(directory) / "target.json"
    raw = read_json(path)
    try:
        made_for = TargetKey(**raw["key"])
        numbers = {name: raw[name] for name in ("num_samples", "num_proposals", "log_z", "log_z_std_error")}
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: not a target file ({error!r}); {REMAKE}") from error
    check_values(asdict(made_for) | numbers, path)
    for role in ("lm", "toxicity"):
        if getattr(made_for, role) != getattr(key, role):
            raise InputError(f"{path}: stale, it was made for another {role} checkpoint; {REMAKE}")
    if made_for != key:
        return None
    samples, count = path.with_name(SAMPLES), numbers.pop("num_samples")
    tensors = read_tensors(samples)
    if "sha256" in raw and raw["sha256"] != digest_of(samples):
        raise InputError(f"{samples}: is not as it was written, target.json has another sha256; {REMAKE}")
    if {name: list(tensor.shape) for name, tensor in tensors.items()} != {
        "tokens": [count, key.length],
        "log_phi": [count],
    }:
        raise InputError(f"{samples}: does not fit target.json; {REMAKE}")
    check_samples(**tensors, vocab_size=vocab_size, path=samples)
    return ExactSamples(tokens=tensors["tokens"].long(), log_phi=tensors["log_phi"], **numbers)


def check_values(values: dict[str, Any], path: Path) -> None:
    """InputError where target.json holds a value of another type, or a number that cannot be."""
    for name, value in values.items():
        kind = KINDS.get(name, str)
        if type(value) is not kind or (kind in (int, float) and not abs(value) < 1e15):
            raise InputError(f"{path}: {name} is {str(value)[:40]!r}, no possible {kind.__name__}; {REMAKE}")
    if not 2 <= values["num_samples"] <= values["num_proposals"] or values["log_z_std_error"] < 0:
        raise InputError(f"{path}: its numbers contradict each other; {REMAKE}")


def check_samples(tokens: Tensor, log_phi: Tensor, vocab_size: int, path: Path) -> None:
    """InputError where tokens [N, T] are not all of the vocabulary, or log phi [N] is not finite and at most 0."""
    if tokens.dtype != torch.int32 or not bool(((tokens >= 0) & (tokens.long() < vocab_size)).all()):
        raise InputError(f"{path}: holds tokens that are not of the vocabulary; {REMAKE}")
    if log_phi.dtype != torch.float32 or not bool(((log_phi > -torch.inf) & (log_phi <= 1e-6)).all()):
        raise InputError(f"{path}: log_phi is not everywhere finite and at most 0; {REMAKE}")
