"""What a job starts from: p^(0), the potential, the scorers, and exact samples of the target sigma.

    sigma(s) = p^(0)(s) phi(s) / Z_sigma (eq. 2),   drawn by rejection (`tsmc/rejection.py`)

Exact samples are kept as tokens [N, T] with log phi [N], and with all that sigma depends on: the
options, and a hash of the networks and of a user's file. Samples of another sigma are never used.
N texts, T tokens, D width of an embedding.
"""

import dataclasses
import functools
import hashlib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from eval import scorers
from eval.options import DTYPES, POCKET, Options
from tinystories.decoder import Conditional
from tinystories.load import checkpoint_directory, load_model, naming, read_json, write_tensors
from tsmc.estimate import Estimate, mean_estimate
from tsmc.proposal import sample_proposal, sequence_log_probs
from tsmc.rejection import ExactSamples
from twist.potential import TextPotential, each_once, factor_of

SHIPPED = POCKET / "target"
SAMPLES = "samples.safetensors"
CLASSIFIED = ("toxicity", "nontoxicity")  # factors of the classifier


@dataclass
class World:
    """The fixed parts of Algorithm 1 and of its evaluation."""

    base: Conditional  # p^(0) after the prompt
    potential: TextPotential
    scores: dict[str, Callable[[list[str]], Tensor]]  # "toxicity", where phi reads the classifier
    encode: Callable[[list[str]], Tensor] | None = None  # N texts -> [N, D], for the table
    exact: ExactSamples | None = None  # None where there are none of this sigma

    def score(self, tokens: Tensor, texts: list[str]) -> dict[str, Tensor]:
        """log phi [N] of texts and of their tokens [N, T], and the other scores."""
        scores = {name: each_once(function, texts) for name, function in self.scores.items()}
        return {"log_phi": self.potential(tokens).cpu()} | scores

    def kl(self, log_q: Tensor) -> Estimate:
        """KL(sigma||q) in nats, from log q [N] of the exact samples."""
        exact = self.exact
        log_p = sequence_log_probs(self.base, exact.tokens)
        mean = mean_estimate(log_p + exact.log_phi - log_q)
        # Both errors count as independent, though they come from the same draws.
        error = math.hypot(mean.std_error, exact.log_z_std_error)
        return Estimate(mean.value - exact.log_z, error, mean.dof)


def load_world(options: Options, folder: Path | None = None) -> World:
    """All of it, with the sentence encoder, and with exact samples: those of --target, those that
    the job in a folder has drawn, or the shipped ones where they are of this sigma.

    ValueError where those of --target are of another sigma.
    """
    world = load_sampling_world(options)
    device, dtype = world.base.prompt.device, DTYPES[options.dtype]
    path = checkpoint_directory(options.similarity_model)
    encoder, tokenizer = scorers.load_scorer(scorers.SentenceEncoder, path, device)
    world.encode = scorers.Runner(encoder.to(dtype), tokenizer)
    if options.target:
        world.exact = load_target(Path(options.target), options, device)
        if world.exact is None:
            raise ValueError(f"--target {options.target}: holds exact samples of another sigma")
    for directory in (folder / "target" if folder else SHIPPED, SHIPPED):
        if world.exact is None and (directory / SAMPLES).exists():
            world.exact = load_target(directory, options, device)
    return world


def load_sampling_world(options: Options) -> World:
    """The language model, and what its potential reads, on the job's device."""
    device, dtype = options.torch_device(), DTYPES[options.dtype]
    given = (options.prompt, options.length, options.end, device, dtype)
    base, tokenizer = load_model(options.lm, *given)
    factors, scores = {}, {}
    if set(CLASSIFIED) & set(options.potential):  # else the classifier is not loaded
        path = checkpoint_directory(options.toxicity_model)
        classifier, words = scorers.load_scorer(scorers.ToxicityClassifier, path, device)
        scorer = scorers.ToxicityScorer(classifier.to(dtype), words)
        factors["toxicity"] = lambda texts: options.beta * scorer(texts).double()
        factors["nontoxicity"] = lambda texts: options.beta * scorer.log_nontoxic(texts).double()
        scores["toxicity"] = lambda texts: scorer(texts).double().exp()
    chosen = [factors.get(spec) or factor_of(spec) for spec in options.potential]
    decode = partial(tokenizer.decode_batch, skip_special_tokens=True)
    potential = TextPotential(chosen, decode, base.prompt, base.end)
    if not options.end:
        tell_ends(base, tokenizer, checkpoint_directory(options.lm))
    return World(base, potential, scores)


def tell_ends(base: Conditional, tokenizer: Any, directory: Path) -> None:
    """Say where p often writes a token that ends a text by the checkpoint's files, but is no end
    of this job."""
    files = [directory / name for name in ("config.json", "generation_config.json")]
    ends: set[int] = set()
    for tokens in [read_json(file).get("eos_token_id") for file in files if file.exists()]:
        ends |= set(tokens if isinstance(tokens, list) else [tokens])
    drawn = sample_proposal(base, None, 64, torch.Generator(base.prompt.device).manual_seed(0))
    share = sum(not ends.isdisjoint(row) for row in drawn.tokens.tolist()) / 64
    if share > 0:
        named = " ".join(f"--end '{tokenizer.id_to_token(end)}'" for end in ends if end is not None)
        print(f"p ends {share:.0%} of its texts, and goes on; give {named}", file=sys.stderr)


@functools.cache
def sigma_of(options: Options) -> dict[str, Any]:
    """All that sigma depends on, as JSON has it: options, and a hash of files."""
    names = ["prompt", "length", "end", "dtype"]
    files = sorted(checkpoint_directory(options.lm).iterdir())
    if set(CLASSIFIED) & set(options.potential):
        names.append("beta")
        files += sorted(checkpoint_directory(options.toxicity_model).iterdir())
    users = [Path(spec.rpartition(":")[0]) for spec in options.potential if ".py:" in spec]
    digest = hashlib.sha256()
    for file in [*files, *users]:
        if file.suffix in (".json", ".txt", ".model", ".safetensors", ".bin", ".py"):
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
    sigma = {name: getattr(options, name) for name in names}
    names_of = [spec.rpartition("/")[2] if ".py:" in spec else spec for spec in options.potential]
    sigma["potential"] = names_of
    return json.loads(json.dumps(sigma | {"files": digest.hexdigest()}))


def save_target(directory: Path, exact: ExactSamples, options: Options) -> None:
    """Write exact samples, with all that their sigma depends on."""
    numbers = dataclasses.asdict(exact)
    tensors = {"tokens": numbers.pop("tokens").int(), "log_phi": numbers.pop("log_phi")}
    target = json.dumps(numbers | {"sigma": sigma_of(options)})
    write_tensors(directory / SAMPLES, tensors, target=target)


def load_target(directory: Path, options: Options, device: torch.device) -> ExactSamples | None:
    """The exact samples of a directory; None where they are of another sigma."""
    path = directory / SAMPLES
    with naming(path), safe_open(path, "pt", device=str(device)) as file:
        numbers = json.loads(file.metadata()["target"])
        if numbers.pop("sigma", None) != sigma_of(options):
            return None
        tokens, log_phi = file.get_tensor("tokens").long(), file.get_tensor("log_phi")
        return ExactSamples(tokens, log_phi, **numbers)
