"""Exact samples of the target sigma on disk: `samples.safetensors` and `target.json`.

    sigma(s) = p^(0)(s) phi(s) / Z_sigma (eq. 2),   drawn by rejection (`tsmc/rejection.py`)

`target.json` has the sha256 of the samples, and what their sigma depends on: samples of other
checkpoints belong to another sigma. N samples, T tokens.
"""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from tinystories import checkpoint
from tinystories.checkpoint import digest_of, reading
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
    potential: list[str] = field(default_factory=lambda: ["toxicity"])  # a file by its hash


def save_target(directory: Path, exact: ExactSamples, key: TargetKey, **notes) -> None:
    """Write `samples.safetensors` and `target.json`, with `notes` beside the numbers."""
    tensors = {"tokens": exact.tokens.to(torch.int32), "log_phi": exact.log_phi.float()}
    checkpoint.write_tensors(directory / SAMPLES, tensors)
    values = {"key": asdict(key), "num_samples": len(exact.tokens)}
    values |= {name: getattr(exact, name) for name in ("num_proposals", "log_z", "log_z_std_error")}
    values["sha256"] = digest_of(directory / SAMPLES)
    checkpoint.write_json(directory / "target.json", values | notes)


def load_target(directory: Path, key: TargetKey, vocab_size: int) -> ExactSamples | None:
    """The samples, None for another prompt, length, beta or potential; InputError if not sound."""
    path = Path(directory) / "target.json"
    samples = path.with_name(SAMPLES)
    raw = checkpoint.read_json(path)
    with reading(path, "not a target file", REMAKE):
        made_for = TargetKey(**raw["key"])
        count = int(raw["num_samples"])
        numbers = (int(raw["num_proposals"]), float(raw["log_z"]), float(raw["log_z_std_error"]))
        if not (2 <= count <= numbers[0] and math.isfinite(numbers[1])):
            raise ValueError("its numbers contradict each other")
    for role in ("lm", "toxicity"):
        if getattr(made_for, role) != getattr(key, role):
            raise InputError(f"{path}: stale, it was made for another {role} checkpoint; {REMAKE}")
    if made_for != key:
        return None
    tensors = checkpoint.read_tensors(samples)
    with reading(samples, "not the exact samples", REMAKE):
        if raw["sha256"] != digest_of(samples):
            raise ValueError("target.json has another sha256")
        tokens = tensors["tokens"].long()
        log_phi = tensors["log_phi"]
        fits = tokens.shape == (count, key.length) and log_phi.shape == (count,)
        if not fits or tokens.min() < 0 or tokens.max() >= vocab_size or not log_phi.max() <= 1e-6:
            raise ValueError("shapes, tokens or log_phi do not fit target.json")
    return ExactSamples(tokens, log_phi, *numbers)
