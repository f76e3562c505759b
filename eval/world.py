"""What a run starts from: p^(0), the potential, the scorers, and exact samples of the target sigma.

    sigma(s) = p^(0)(s) phi(s) / Z_sigma (eq. 2),   drawn by rejection (`tsmc/rejection.py`)

Exact samples lie in one file, whose metadata say what their sigma depends on: samples of other
checkpoints belong to another sigma. N samples, T tokens, D width of an embedding.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

import tinystories
from eval.command import say
from eval.config import DTYPES, POCKET, RunOptions
from eval.metrics import Samples
from eval.scorers import similarity, toxicity
from eval.scorers.encoder import Runner
from eval.scorers.potentials import CLASSIFIED, make_factors, user_file
from tinystories import Conditional, checkpoint
from tinystories.checkpoint import digest_of, fingerprint, reading
from tinystories.decoder import NO_END
from tinystories.errors import InputError, listed
from tinystories.hub import checkpoint_directory
from tinystories.tokenizer import encode_prompt
from tsmc import processes
from tsmc.interfaces import Report, ignore
from tsmc.proposal import sample_proposal
from tsmc.rejection import ExactSamples
from tsmc.runs import Streams
from twist.potential import TextPotential, check_potential, each_once

SHIPPED = POCKET / "target"
SAMPLES = "samples.safetensors"
NUMBERS = ("num_proposals", "log_z", "log_z_std_error")  # of exact samples


@dataclass
class World:
    """The fixed parts of Algorithm 1 and of its evaluation."""

    tokenizer: Tokenizer
    base: Conditional  # p^(0) after the prompt
    potential: TextPotential
    log_toxicity: Callable[[list[str]], Tensor] | None  # a column of the table, if phi reads it
    encode: Runner | None = None  # embeds texts, N texts -> [N, D], for the table
    exact: ExactSamples | None = None  # exact samples of sigma, if there are any
    exact_vectors: Tensor | None = None  # [N, D] embeddings of the exact samples
    hashes: dict[str, str] = field(default_factory=dict)  # of what it was loaded from (`identity`)

    def score(self, tokens: Tensor, group: list[int] | None = None) -> Samples:
        """Decode and score sequences tokens [N, T]; without groups each text is its own group."""
        return self.score_texts(self.potential.texts(tokens), tokens, group)

    def score_texts(
        self, texts: list[str], tokens: Tensor | None = None, group: list[int] | None = None
    ) -> Samples:
        """The same of N texts; without tokens nothing is said of their ends."""
        scores = {"log_phi": self.potential.of_texts(texts)}
        if tokens is not None and self.base.end != NO_END:
            scores["ended"] = (tokens == self.base.end).any(1).cpu().double()  # else cut at T
        if self.log_toxicity is not None:
            scores["toxicity"] = each_once(self.log_toxicity, texts).exp()
        return Samples(texts, scores, group or list(range(len(texts))))

    def draw_base(self, streams: Streams, word: str, count: int, report: Report = ignore) -> Tensor:
        """Texts of p^(0) as tokens [N, T], N = count, from the random stream of this name."""

        def draw(size: int, generator: torch.Generator) -> dict[str, Tensor]:
            return {"tokens": sample_proposal(self.base, None, size, generator).tokens}

        return streams.draw(word, None, count, draw, report=report)["tokens"]

    def set_exact(self, exact: ExactSamples) -> None:
        """Compare with these exact samples from here on."""
        self.exact = exact.to(self.base.prompt.device)
        self.exact_vectors = self.encode(self.potential.texts(exact.tokens))


def reads_classifier(options: RunOptions) -> bool:
    """Whether phi reads the toxicity classifier; otherwise it is not loaded."""
    return not set(CLASSIFIED).isdisjoint(options.potential)


def directory_of(options: RunOptions, role: str) -> Path:
    """Directory of `lm`, `toxicity_model` or `similarity_model`, fetched where needed."""
    return checkpoint_directory(getattr(options, role), "--" + role.replace("_", "-"))


def load_sigma(options: RunOptions) -> World:
    """The language model and what its potential reads, on the run's device."""
    device = options.torch_device()
    dtype = DTYPES[options.dtype]
    network, tokenizer = tinystories.load(directory_of(options, "lm"), device)
    scorer = None
    if reads_classifier(options):
        classifier, its_tokenizer = toxicity.load(directory_of(options, "toxicity_model"), device)
        scorer = toxicity.ToxicityScorer(classifier.to(dtype), its_tokenizer)
        # Potential and table score the same texts one after the other.
        scorer.logits = lru_cache(maxsize=1)(scorer.logits)
    ids = torch.tensor(encode_prompt(tokenizer, options.prompt), device=device)  # [P]
    end = NO_END if not options.end else tokenizer.token_to_id(options.end)
    if end is None:
        raise InputError(f"--end {options.end}: is not one of the tokenizer's tokens; name one")
    base = Conditional(network.to(dtype), ids, options.length, end)
    decode = partial(tokenizer.decode_batch, skip_special_tokens=True)
    factors = make_factors(options.potential, options.beta, scorer)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    potential = TextPotential(factors, decode, ids, end, encode)
    # phi = p(toxic | s)^beta is nearly 0 for every text; its beta-th root gives labels that differ.
    potential.scale = max(options.beta, 1.0) if scorer is not None else 1.0
    return World(tokenizer, base, potential, scorer)


def load_world(options: RunOptions, run: Path | None = None) -> World:
    """`load_sigma`, the sentence encoder, and exact samples: those of --target, those that a run
    has drawn, or the shipped ones where they are of this sigma.

    InputError where something that the options of a run name has changed since it was made.
    """
    if processes.rank() == 0:
        say("loading the networks")
    hashes = identity(options)
    if run is not None:
        check_unchanged(run, hashes)
    world, device = load_sigma(options), options.torch_device()
    world.hashes = hashes
    source = torch.Generator(device).manual_seed(options.seed)
    check_potential(world.base, world.potential, source)
    encoder, its_tokenizer = similarity.load(directory_of(options, "similarity_model"), device)
    world.encode = Runner(encoder.to(DTYPES[options.dtype]), its_tokenizer)
    directory = Path(options.target) if options.target else SHIPPED
    if not options.target and run is not None and (run / "target" / SAMPLES).exists():
        directory = run / "target"
    exact = load_target(directory, sigma_key(options, hashes))
    if exact is not None:
        world.set_exact(exact)
    elif directory != SHIPPED:
        fault = f"{directory}: holds samples of another sigma"
        remedy = "name another --target" if options.target else "make a new run"
        raise InputError(f"{fault}; restore what it was drawn with, or {remedy}")
    return world


def identity(options: RunOptions) -> dict[str, str]:
    """Hashes of the networks and of the user's own files that a run's results depend on."""
    roles = ["lm", "similarity_model"]
    if reads_classifier(options):
        roles.append("toxicity_model")
    hashes = {role: fingerprint(directory_of(options, role)) for role in roles}
    own = filter(None, map(user_file, options.potential))
    return hashes | {str(path): digest_of(path) for path, _ in own}


def check_unchanged(run: Path, hashes: dict[str, str]) -> None:
    """InputError where something that a run's options name is not what the run was made with."""
    made_with = checkpoint.read_json(run / "config.json").get("networks", {})
    names = hashes.keys() | made_with.keys()
    changed = [name for name in names if made_with.get(name) != hashes.get(name)]
    if changed:
        fault = f"{run}: {listed(changed)} changed since the run was made"
        raise InputError(f"{fault}; restore what it had, or make a new run")


def sigma_key(options: RunOptions, hashes: dict[str, str]) -> dict[str, Any]:
    """What the sigma of a run depends on; a user's file counts by its content."""
    roles = ("lm", "toxicity_model")
    key: dict[str, Any] = {role: hashes[role] for role in roles if role in hashes}
    key |= {name: getattr(options, name) for name in ("prompt", "length", "beta", "end")}
    pairs = [(spec, user_file(spec)) for spec in options.potential]
    specs = [f"{hashes.get(str(own[0]))}:{own[1]}" if own else spec for spec, own in pairs]
    return key | {"potential": specs}


def save_target(directory: Path, exact: ExactSamples, key: dict) -> None:
    """Write exact samples, with the key of their sigma."""
    tensors = {"tokens": exact.tokens.to(torch.int32), "log_phi": exact.log_phi}
    values = {"key": key} | {name: getattr(exact, name) for name in NUMBERS}
    checkpoint.write_tensors(directory / SAMPLES, tensors, target=json.dumps(values))


def load_target(directory: Path, key: dict) -> ExactSamples | None:
    """The samples of a directory; None where they are of another sigma; InputError if damaged."""
    path = directory / SAMPLES
    tensors = checkpoint.read_tensors(path)
    with reading(path, "holds no exact samples", "make it anew, or leave --target out"):
        values = json.loads(checkpoint.read_metadata(path)["target"])
        if values["key"] != key:
            return None
        numbers = [float(values[name]) for name in NUMBERS[1:]]
        proposals = int(values["num_proposals"])
        return ExactSamples(tensors["tokens"].long(), tensors["log_phi"], proposals, *numbers)
