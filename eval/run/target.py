"""Exact samples of the target sigma on disk: `samples.safetensors` and `target.json`, as in `checkpoints/pocket/target`.

    sigma(s) = p^(0)(s) phi(s) / Z_sigma (eq. 2),   drawn by rejection (`tsmc/rejection.py`)

`target.json` names the fingerprints of the language model and of the classifier that made them; samples of other checkpoints
are of another sigma, so stale files are refused. It also has the sha256 of the samples. N samples, T tokens.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
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
    made_for = read_key(raw.get("key"), path)
    for role in ("lm", "toxicity"):
        if getattr(made_for, role) != getattr(key, role):
            raise InputError(f"{path}: stale, it was made for another {role} checkpoint; {REMAKE}")
    numbers = {name: number(raw, name, int, path) for name in ("num_samples", "num_proposals")}
    numbers |= {name: number(raw, name, float, path) for name in ("log_z", "log_z_std_error")}
    if not 2 <= numbers["num_samples"] <= numbers["num_proposals"] or numbers["log_z_std_error"] < 0:
        raise InputError(f"{path}: its numbers contradict each other; {REMAKE}")
    if made_for != key:
        return None
    samples = path.with_name(SAMPLES)
    tensors, count = read_tensors(samples), numbers.pop("num_samples")
    if "sha256" in raw and raw["sha256"] != digest_of(samples):
        raise InputError(f"{samples}: is not as it was written, target.json has another sha256; {REMAKE}")
    if {name: list(tensor.shape) for name, tensor in tensors.items()} != {
        "tokens": [count, key.length],
        "log_phi": [count],
    }:
        raise InputError(f"{samples}: does not fit target.json; {REMAKE}")
    check_samples(**tensors, vocab_size=vocab_size, path=samples)
    return ExactSamples(tokens=tensors["tokens"].long(), log_phi=tensors["log_phi"], **numbers)


def read_key(raw: Any, path: Path) -> TargetKey:
    """The key in target.json; InputError where it is none."""
    try:
        key = TargetKey(**raw)
    except TypeError as error:
        raise InputError(f"{path}: not a target file (key: {error}); {REMAKE}") from error
    for item in fields(key):
        value = getattr(key, item.name)
        if type(value) is not getattr(item.type, "__origin__", item.type):
            raise InputError(f"{path}: not a target file ({item.name} of its key is {str(value)[:40]!r}); {REMAKE}")
    return key


def number(raw: dict, name: str, kind: type, path: Path) -> int | float:
    """A finite number in target.json; InputError where it is none."""
    value = raw.get(name)
    if type(value) is not kind or not abs(value) < 1e15:
        raise InputError(f"{path}: {name} is {str(value)[:40]!r}, no possible {kind.__name__}; {REMAKE}")
    return value


def check_samples(tokens: Tensor, log_phi: Tensor, vocab_size: int, path: Path) -> None:
    """InputError where tokens [N, T] are not all of the vocabulary, or log phi [N] is no log of a probability above zero."""
    if tokens.dtype != torch.int32 or not bool(((tokens >= 0) & (tokens.long() < vocab_size)).all()):
        raise InputError(f"{path}: holds tokens that are not of the vocabulary; {REMAKE}")
    if log_phi.dtype != torch.float32 or not bool(((log_phi > -torch.inf) & (log_phi <= 1e-6)).all()):
        raise InputError(f"{path}: log_phi is not everywhere finite and at most 0; {REMAKE}")
