"""What a run starts from: p^(0), the potential, the scorers, and exact samples of the target sigma.

    sigma(s) = p^(0)(s) phi(s) / Z_sigma (eq. 2),   drawn by rejection (`tsmc/rejection.py`)

Exact samples lie on disk as `samples.safetensors` beside `target.json`, which has their sha256 and
what their sigma depends on: samples of other checkpoints belong to another sigma. N samples, T
tokens, D width of an embedding.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

import tinystories
from eval.metrics import Samples
from eval.run.options import DTYPES, PRESETS, RunConfig
from eval.scorers import similarity, toxicity
from eval.scorers.encoder import Runner
from eval.scorers.potentials import make_factors, user_file
from tinystories import Conditional, checkpoint
from tinystories.checkpoint import digest_of, fingerprint, reading
from tinystories.decoder import NO_END
from tinystories.errors import InputError
from tinystories.tokenizer import tokenizing
from tsmc.rejection import ExactSamples
from twist.potential import TextPotential, check_potential, each_once

REMAKE = "make it anew with python -m eval.pocket target"
SAMPLES = "samples.safetensors"


@dataclass
class Setup:
    """The fixed parts of Algorithm 1 and of its evaluation."""

    tokenizer: Tokenizer
    base: Conditional  # p^(0) after the prompt
    potential: TextPotential
    log_toxicity: Callable[[list[str]], Tensor] | None  # a column of the table, if phi reads it
    encode: Runner | None = None  # embeds texts, N texts -> [N, D], for the table
    exact: ExactSamples | None = None  # exact samples of sigma, if there are any
    exact_vectors: Tensor | None = None  # [N, D] embeddings of the exact samples

    def score(self, tokens: Tensor, group: list[int] | None = None) -> Samples:
        """Decode and score sequences tokens [N, T]; without groups each text is its own group."""
        return self.score_texts(self.potential.texts(tokens), tokens, group)

    def score_texts(
        self, texts: list[str], tokens: Tensor | None = None, group: list[int] | None = None
    ) -> Samples:
        """The same of N texts; InputError where the potential reads tokens and there are none."""
        scores = {"log_phi": self.potential.of_texts(texts, tokens)}
        if self.log_toxicity is not None:
            scores["toxicity"] = each_once(self.log_toxicity, texts).exp()
        return Samples(texts, scores, group or list(range(len(texts))))


def load_sigma(config: RunConfig) -> Setup:
    """The language model and what its potential reads, on the run's device."""
    device = config.torch_device()
    network, tokenizer = tinystories.load(config.checkpoint("lm"), device)
    scorer = load_classifier(config) if config.reads_classifier() else None
    with tokenizing("the language model"):
        ids = torch.tensor(tokenizer.encode(config.prompt).ids, dtype=torch.long, device=device)
    end = NO_END if not config.end else tokenizer.token_to_id(config.end)
    if end is None:
        raise InputError(f"--end {config.end}: is not one of the tokenizer's tokens; name one")
    base = Conditional(network.to(DTYPES[config.dtype]), ids, config.length, end)

    def decode(rows: list[list[int]]) -> list[str]:
        with tokenizing("the language model"):
            return tokenizer.decode_batch(rows, skip_special_tokens=True)

    potential = TextPotential(make_factors(config.potential, config.beta, scorer), decode, ids, end)
    potential(ids.repeat(config.length)[None, : config.length])  # fails before files are written
    return Setup(tokenizer, base, potential, scorer)


def load_setup(config: RunConfig) -> Setup:
    """`load_sigma`, the sentence encoder, and the shipped samples of sigma if they fit."""
    setup, device = load_sigma(config), config.torch_device()
    source = torch.Generator(device).manual_seed(config.seed)
    check_potential(setup.base, setup.potential, source)
    encoder, its_tokenizer = similarity.load(config.checkpoint("similarity_model"), device)
    setup.encode = Runner(encoder.to(DTYPES[config.dtype]), its_tokenizer)
    directory = PRESETS[config.preset].target
    if directory is not None and not config.lm and not config.toxicity_model:
        exact = load_target(directory, sigma_key(config), setup.base.vocab_size)
        setup.exact = exact and exact.to(device)
    return setup


def load_classifier(config: RunConfig) -> toxicity.ToxicityScorer:
    """log p(toxic | text); potential and table score the same texts one after the other."""
    directory = config.checkpoint("toxicity_model")
    classifier, tokenizer = toxicity.load(directory, config.torch_device())
    classifier = classifier.to(DTYPES[config.dtype])
    scorer = toxicity.ToxicityScorer(classifier, tokenizer)
    scorer.logits = lru_cache(maxsize=1)(scorer.logits)
    return scorer


def identity(config: RunConfig) -> dict[str, str]:
    """Hashes of the networks and of the user's own files that a run's results depend on."""
    roles = ["lm", "similarity_model"]
    if config.reads_classifier():
        roles.append("toxicity_model")
    hashes = {role: fingerprint(config.checkpoint(role)) for role in roles}
    files = [user_file(spec)[0] for spec in config.potential if user_file(spec)]
    return hashes | {str(path): digest_of(path) for path in files}


def sigma_key(config: RunConfig) -> dict:
    """What the sigma of a run depends on, as target.json has it."""
    hashes = identity(config)
    potential = []
    for spec in config.potential:
        own = user_file(spec)  # a file counts by its content
        potential.append(f"{own[1]} of {hashes[str(own[0])]}" if own else spec)
    key = {
        "lm": hashes["lm"],
        "toxicity": hashes.get("toxicity_model", ""),
        "prompt": config.prompt,
        "length": config.length,
        "beta": config.beta,
        "potential": potential,
    }
    return key | ({"end": config.end} if config.end else {})


def save_target(directory: Path, exact: ExactSamples, key: dict, **notes) -> None:
    """Write `samples.safetensors` and `target.json`, with `notes` beside the numbers."""
    tensors = {"tokens": exact.tokens.to(torch.int32), "log_phi": exact.log_phi.float()}
    checkpoint.write_tensors(directory / SAMPLES, tensors)
    values = {"key": key, "num_samples": len(exact.tokens)}
    values |= {name: getattr(exact, name) for name in ("num_proposals", "log_z", "log_z_std_error")}
    values["sha256"] = digest_of(directory / SAMPLES)
    checkpoint.write_json(directory / "target.json", values | notes)


def load_target(directory: Path, key: dict, vocab_size: int) -> ExactSamples | None:
    """The samples, None for another prompt, length, beta or potential; InputError if not sound."""
    path = Path(directory) / "target.json"
    samples = path.with_name(SAMPLES)
    raw = checkpoint.read_json(path)
    with reading(path, "not a target file", REMAKE):
        made_for = {"potential": ["toxicity"]} | raw["key"]
        if not made_for.keys() <= key.keys() | {"end"}:
            raise ValueError("its key has other entries")
        count = int(raw["num_samples"])
        numbers = (int(raw["num_proposals"]), float(raw["log_z"]), float(raw["log_z_std_error"]))
        if not (2 <= count <= numbers[0] and math.isfinite(numbers[1])):
            raise ValueError("its numbers contradict each other")
    for name in ("prompt", "length", "beta", "potential", "end"):
        if made_for.get(name) != key.get(name):
            return None
    for role in ("lm", "toxicity"):
        if made_for.get(role) != key[role]:
            raise InputError(f"{path}: stale, it was made for another {role} checkpoint; {REMAKE}")
    tensors = checkpoint.read_tensors(samples)
    with reading(samples, "not the exact samples", REMAKE):
        if raw["sha256"] != digest_of(samples):
            raise ValueError("target.json has another sha256")
        tokens = tensors["tokens"].long()
        log_phi = tensors["log_phi"]
        fits = tokens.shape == (count, key["length"]) and log_phi.shape == (count,)
        if not fits or tokens.min() < 0 or tokens.max() >= vocab_size or not log_phi.max() <= 1e-6:
            raise ValueError("shapes, tokens or log_phi do not fit target.json")
    return ExactSamples(tokens, log_phi, *numbers)
