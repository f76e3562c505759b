"""Exact samples of the target sigma on disk: `samples.safetensors` and `target.json`.

    sigma(s) = p^(0)(s) phi(s) / Z_sigma (eq. 2),   drawn by rejection (`tsmc/rejection.py`)

`target.json` names the fingerprints of the language model and of the classifier that the samples
were made with, because samples of other checkpoints belong to another sigma, and the sha256 of the
samples. N samples, T tokens.
"""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from tinystories.checkpoint import (
    digest_of,
    read_json,
    read_tensors,
    reading,
    write_json,
    write_tensors,
)
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
    write_tensors(directory / SAMPLES, tensors)
    values = {"key": asdict(key), "num_samples": len(exact.tokens)}
    for name in ("num_proposals", "log_z", "log_z_std_error"):
        values[name] = getattr(exact, name)
    values["sha256"] = digest_of(directory / SAMPLES)
    write_json(directory / "target.json", values | notes)


def load_target(directory: Path, key: TargetKey, vocab_size: int) -> ExactSamples | None:
    """The samples, or None where they belong to another prompt, length, beta or potential.

    InputError for those of other checkpoints, impossible values, or files that do not fit.
    """
    path = Path(directory) / "target.json"
    samples = path.with_name(SAMPLES)
    raw = read_json(path)
    with reading(path, "not a target file", REMAKE):
        made_for = TargetKey(**raw["key"])
        log_z = float(raw["log_z"])
        log_z_std_error = float(raw["log_z_std_error"])
        count = int(raw["num_samples"])
        numbers_fit = 2 <= count <= raw["num_proposals"] and log_z_std_error >= 0
        if not (numbers_fit and math.isfinite(log_z)):
            raise ValueError("its numbers contradict each other")
    for role in ("lm", "toxicity"):
        if getattr(made_for, role) != getattr(key, role):
            raise InputError(f"{path}: stale, it was made for another {role} checkpoint; {REMAKE}")
    if made_for != key:
        return None
    tensors = read_tensors(samples)
    with reading(samples, "not the exact samples", REMAKE):
        if raw["sha256"] != digest_of(samples):
            raise ValueError("target.json has another sha256")
        tokens = tensors["tokens"].long()
        log_phi = tensors["log_phi"]
        if tokens.shape != (count, key.length) or log_phi.shape != (count,):
            raise ValueError("its shapes do not fit target.json")
        if not bool(((tokens >= 0) & (tokens < vocab_size)).all()):
            raise ValueError("it holds tokens outside the vocabulary")
        if not bool(((log_phi > -torch.inf) & (log_phi <= 1e-6)).all()):
            raise ValueError("log_phi is not finite and at most 0 everywhere")
    return ExactSamples(tokens, log_phi, raw["num_proposals"], log_z, log_z_std_error)
