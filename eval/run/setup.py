"""What a run starts from: p^(0), the potential, sigma after each prompt with exact samples of it, the scorers of the table.

Here options turn into the parts of a run; what is below gets these parts and numbers.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from tokenizers import Tokenizer
from torch import Tensor

import tinystories
from eval.run.options import DTYPES, PRESETS, RunConfig
from eval.run.state import digest_of
from eval.run.target import TargetKey, load_target, target_key
from eval.scorers import similarity, toxicity
from eval.scorers.potentials import fingerprints, make_factors, user_file
from tinystories import Conditional, GPTNeo
from tinystories.checkpoint import fingerprint
from tinystories.errors import InputError
from tinystories.fast import accelerate
from tsmc.rejection import ExactSamples
from tsmc.sampler import Sigma
from twist import TextPotential, base_potential, effective_potential


@dataclass
class Problem:
    """Sigma after one prompt, which every generation shares; `exact` holds exact samples of it, if there are any.

    `name` tells the prompts of a run apart in its files: empty for the first, "prompt-2" for the next.
    """

    name: str
    prompt: str
    base: Conditional
    potential: TextPotential
    log_toxicity: Callable[[list[str]], Tensor]  # a measure of the table, whatever the potential is
    exact: ExactSamples | None
    exact_vectors: Tensor | None = None  # [M, D] their embeddings


@dataclass
class Setup:
    """The fixed parts of Algorithm 1 and of its evaluation."""

    model: GPTNeo
    tokenizer: Tokenizer
    problems: list[Problem]
    encode: similarity.SimilarityScorer
    effective: bool = True  # False leaves phi as it is in every generation: the ablation of phi^(m)

    def sigmas(self, model: GPTNeo | None = None) -> list[Sigma]:
        """Sigma after each prompt as p^(m) = model sees it: through phi^(m) (eq. 8), or for p^(0) (None) through phi itself."""
        if model is None:
            return [Sigma(problem.base, base_potential(problem.potential)) for problem in self.problems]
        sigmas = []
        for problem in self.problems:
            log_potential = base_potential(problem.potential)
            if self.effective:
                log_potential = effective_potential(problem.potential, problem.base)
            sigmas.append(Sigma(Conditional(model, problem.base.prompt, problem.base.length), log_potential))
        return sigmas


class LastCall:
    """A scorer that remembers its last call: the potential and the table ask for the scores of the same texts."""

    def __init__(self, scorer: Callable[[list[str]], Tensor]):
        self.scorer, self.texts, self.scores = scorer, None, None

    def __call__(self, texts: list[str]) -> Tensor:
        """What `scorer` makes of the texts."""
        if texts != self.texts:
            self.scores, self.texts = self.scorer(texts), list(texts)
        return self.scores


def load_setup(config: RunConfig) -> Setup:
    """The three networks on the run's device, and the shipped samples of sigma where there are any for these options.

    InputError names the option or file that is at fault.
    """
    device, dtype = config.torch_device(), DTYPES[config.dtype]
    model, tokenizer = tinystories.load(config.checkpoint("lm"), device)
    classifier, its_tokenizer = toxicity.load(config.checkpoint("toxicity_model"), device)
    scorer = toxicity.ToxicityScorer(accelerate(classifier.to(dtype)), its_tokenizer)
    scorer.logits = LastCall(scorer.logits)
    encoder, its_tokenizer = similarity.load(config.checkpoint("similarity_model"), device)
    encode = similarity.SimilarityScorer(accelerate(encoder.to(dtype)), its_tokenizer)
    model = accelerate(model.to(dtype))
    factors = make_factors(config.potential, config.beta, scorer)
    decode = partial(tokenizer.decode_batch, skip_special_tokens=True)  # end-of-text leaves no trace in a text
    problems = []
    for number, prompt in enumerate(dict.fromkeys(config.prompt), 1):
        ids = torch.tensor(tokenizer.encode(prompt).ids, dtype=torch.long, device=device)
        base = Conditional(model, ids, config.length)
        potential = TextPotential(factors, decode, ids)
        potential(ids.repeat(config.length)[None, : config.length])  # a mistake in it shows before anything is written
        name = "" if number == 1 else f"prompt-{number}"
        exact = shipped_samples(config, prompt, model.config.vocab_size)
        problems.append(Problem(name, prompt, base, potential, scorer, exact and exact.to(device)))
    check_memory(config, model)
    return Setup(model, tokenizer, problems, encode, config.effective_potential)


def check_memory(config: RunConfig, model: GPTNeo) -> None:
    """InputError for an option that by itself asks for more memory than there is: keys and values, or the twist with Adam."""
    sizes, weight = model.config, model.wte.weight
    row = bytes_of_sequence(config, model)
    needed = {"--particles": config.particles * row, "--eval-particles": config.eval.particles * row}
    if config.method == "pooled":
        hidden, learned = config.pool.hidden_units, 12 * config.length * sizes.vocab_size
        needed["--pool-batch-size"] = config.pool.batch_size * learned
        needed["--pool-hidden-units"] = 16 * hidden * (2 * sizes.hidden_size + hidden)
    else:
        hidden = config.ctl.hidden_units
        needed["--ctl-batch-size"] = config.ctl.batch_size * row
        needed["--ctl-hidden-units"] = 16 * hidden * (sizes.hidden_size + hidden + sizes.vocab_size)
    there = memory_of(weight.device)
    for flag, size in needed.items():
        if size > there:
            raise InputError(
                f"{flag} needs {size / 1e9:.0f} GB of memory, and there are {there / 1e9:.0f} GB; lower it"
            )


def bytes_of_sequence(config: RunConfig, model: GPTNeo) -> int:
    """The keys and values that one sequence leaves behind while it is sampled."""
    sizes = model.config
    return 2 * model.wte.weight.element_size() * sizes.num_layers * config.length * sizes.hidden_size


def memory_of(device: torch.device) -> float:
    """Bytes of memory of a device, as far as can be told."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf


def sigma_key(config: RunConfig, prompt: str) -> TargetKey:
    """What the sigma of this run depends on after one prompt."""
    lm, classifier = config.checkpoint("lm"), config.checkpoint("toxicity_model")
    return target_key(lm, classifier, prompt, config.length, config.beta, fingerprints(config.potential))


def shipped_samples(config: RunConfig, prompt: str, vocab_size: int) -> ExactSamples | None:
    """The exact samples that come with the preset, if they are of this sigma."""
    shipped = PRESETS[config.preset].target if config.uses_preset_checkpoints() else None
    return None if shipped is None else load_target(shipped, sigma_key(config, prompt), vocab_size)


def identity(config: RunConfig) -> dict[str, str]:
    """Hashes of the three networks and of the user's own files that a run's results depend on."""
    files: Sequence = [place[0] for place in map(user_file, config.potential) if place is not None]
    networks = {role: fingerprint(config.checkpoint(role)) for role in ("lm", "toxicity_model", "similarity_model")}
    return networks | {str(path): digest_of(path) for path in files}
