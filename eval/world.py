"""What a job starts from: p^(0), the potential, the scorers, and exact samples of the target sigma.

    sigma(s) = p^(0)(s) phi(s) / Z_sigma (eq. 2),   drawn by rejection (`tsmc/rejection.py`)

Exact samples are kept with all that sigma depends on. N texts, T tokens, D width of an embedding.
"""

import dataclasses
import functools
import hashlib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from eval.options import DTYPES, POCKET, Options
from eval.scorers import Runner, SentenceEncoder, ToxicityClassifier, load_scorer
from tinystories.decoder import Conditional
from tinystories.load import checkpoint_directory, load_model, located, read_json, write_tensors
from tsmc.estimate import Estimate, mean_estimate
from tsmc.proposal import sample_proposal
from tsmc.rejection import ExactSamples
from twist.potential import TextPotential, each_once, factor_of

SHIPPED = POCKET / "target"
SAMPLES = "samples.safetensors"
CLASSIFIED = {"toxicity", "nontoxicity"}  # factors that read the classifier


@dataclass
class World:
    """The fixed parts of Algorithm 1 and of its evaluation."""

    base: Conditional  # p^(0) after the prompt
    potential: TextPotential
    scores: dict[str, Callable[[list[str]], Tensor]]  # "toxicity", where phi reads the classifier
    tokenizer: Any  # of the language model
    encode: Callable[[list[str]], Tensor] | None = None  # N texts -> [N, D], for the table
    exact: ExactSamples | None = None  # None where there are none of this sigma
    plain: tuple[Tensor, ...] | None = None  # of row Base tokens, log phi, log p phi [N]

    def score(self, tokens: Tensor, texts: list[str]) -> dict[str, Tensor]:
        """log phi [N] of texts and of their tokens [N, T], and the other scores."""
        scores = {name: each_once(function, texts) for name, function in self.scores.items()}
        return {"log_phi": self.potential(tokens).cpu()} | scores

    def kl(self, log_w: Tensor) -> Estimate:
        """KL(sigma||q) in nats, from log w = log p^(0) phi / q [N] of the exact samples."""
        mean = mean_estimate(log_w)
        # Both errors count as independent, though they come from the same draws.
        error = math.hypot(mean.std_error, self.exact.log_z_std_error)
        return Estimate(mean.value - self.exact.log_z, error, mean.dof)


def load_world(options: Options, folder: Path | None = None) -> World:
    """All of it, with exact samples: of --target, the job in a folder, or the shipped ones."""
    world = load_sampling_world(options)
    device = world.base.prompt.device
    encoder, tokenizer = load_scorer(SentenceEncoder, options.similarity_model, device)
    world.encode = Runner(encoder.to(DTYPES[options.dtype]), tokenizer)
    usual = folder / "target" if folder else SHIPPED
    for directory in [Path(options.target)] if options.target else [usual, SHIPPED]:
        if world.exact is None and (options.target or (directory / SAMPLES).exists()):
            world.exact = load_target(directory, options, device)
    if options.target and world.exact is None:
        raise ValueError(f"--target {options.target}: holds exact samples of another sigma")
    return world


def load_sampling_world(options: Options) -> World:
    """The language model and what its potential reads, on the job's device."""
    device, dtype = options.torch_device(), DTYPES[options.dtype]
    shape = (options.prompt, options.length, options.end)
    base, tokenizer = load_model(options.lm, *shape, device, dtype)
    factors, scores = {}, {}
    if CLASSIFIED & set(options.potential):  # else the classifier is not loaded
        classifier, words = load_scorer(ToxicityClassifier, options.toxicity_model, device)
        logits = Runner(classifier.to(dtype), words)
        log_toxic = lambda texts: F.logsigmoid(-logits(texts)).double()  # noqa: E731
        factors["toxicity"] = lambda texts: options.beta * log_toxic(texts)
        factors["nontoxicity"] = lambda texts: options.beta * F.logsigmoid(logits(texts)).double()
        scores["toxicity"] = lambda texts: log_toxic(texts).exp()
    chosen = [factors.get(spec) or factor_of(spec) for spec in options.potential]
    potential = TextPotential(chosen, tokenizer.decode_batch, base.prompt, base.end)
    world = World(base, potential, scores, tokenizer)
    try_texts(world, read_json(checkpoint_directory(options.lm) / "config.json"))
    return world


def try_texts(world: World, config: dict[str, Any]) -> None:
    """Refuse probabilities for log phi; say where p writes tokens without text, or unknown ends."""
    base = world.base
    drawn = sample_proposal(base, None, 64, torch.Generator(base.prompt.device).manual_seed(0))
    log_phi = world.potential(drawn.tokens)  # [64]
    if 0 < log_phi.max() <= 1 and log_phi.min() >= 0:
        raise ValueError("log phi of all texts is in [0, 1], as probabilities are; take logarithms")
    written = [set(row) for row in drawn.tokens.tolist()]
    end = config.get("eos_token_id")
    ends = set(end if isinstance(end, list) else [end])
    share = sum(not ends.isdisjoint(row) for row in written) / 64
    if share > 0 and not base.end:
        options = " ".join(f"--end '{world.tokenizer.id_to_token(end)}'" for end in ends)
        print(f"p ends {share:.0%} of its texts, and goes on; give {options}", file=sys.stderr)
    if set().union(*written) - set(world.tokenizer.get_vocab().values()):
        print("p writes tokens that have no text in its tokenizer", file=sys.stderr)


@functools.cache
def sigma_of(options: Options) -> dict[str, Any]:
    """All that sigma depends on, as JSON has it: options, and a hash of files."""
    names = ["prompt", "length", "end", "dtype"]
    files = {"lm": checkpoint_directory(options.lm)}
    if CLASSIFIED & set(options.potential):
        names.append("beta")
        files["toxicity_model"] = checkpoint_directory(options.toxicity_model)
    potential = list(options.potential)
    for n, spec in enumerate(potential):
        if ".py:" in spec:  # a user's file may be moved
            path = located(spec.rpartition(":")[0])
            files[path.name] = path
            potential[n] = f"{path.name}:{spec.rpartition(':')[2]}"
    sigma = {name: getattr(options, name) for name in names}
    sigma |= {"potential": potential, "files": {name: digest(files[name]) for name in files}}
    return json.loads(json.dumps(sigma))


def digest(path: Path) -> str:
    """A hash of a file, or of the weights in a directory."""
    total = hashlib.sha256()
    weights = [*path.glob("*.safetensors"), *path.glob("*.bin")]
    for file in sorted(weights) if path.is_dir() else [path]:
        with file.open("rb") as content:
            total.update(hashlib.file_digest(content, "sha256").digest())
    return total.hexdigest()


def save_target(directory: Path, exact: ExactSamples, options: Options) -> None:
    """Write exact samples, with all that their sigma depends on."""
    numbers = dataclasses.asdict(exact) | {"sigma": sigma_of(options)}
    tensors = {"tokens": numbers.pop("tokens").int(), "log_phi": numbers.pop("log_phi")}
    write_tensors(directory / SAMPLES, tensors, target=json.dumps(numbers))


def load_target(directory: Path, options: Options, device: torch.device) -> ExactSamples | None:
    """The exact samples of a directory; None where they are of another sigma."""
    with safe_open(directory / SAMPLES, "pt", device=str(device)) as file:
        numbers = json.loads(file.metadata()["target"])
        if numbers.pop("sigma", None) != sigma_of(options):
            return None
        tokens, log_phi = file.get_tensor("tokens").long(), file.get_tensor("log_phi")
        return ExactSamples(tokens, log_phi, **numbers)
