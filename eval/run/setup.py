"""What a run starts from: p^(0), the potential, sigma with any exact samples, the scorers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

import tinystories
from eval.run.options import DTYPES, PRESETS, RunConfig
from eval.run.target import TargetKey, load_target
from eval.scorers import similarity, toxicity
from eval.scorers.potentials import fingerprints, make_factors, user_file
from tinystories import Conditional, GPTNeo
from tinystories.checkpoint import digest_of, fingerprint
from tinystories.fast import pack
from tinystories.tokenizer import tokenizing
from tsmc.interfaces import Twist
from tsmc.rejection import ExactSamples
from tsmc.sampler import Sigma
from twist.adapter import AdaptedGPTNeo, Adapter
from twist.potential import TextPotential, base_potential, effective_potential


@dataclass
class Setup:
    """The fixed parts of Algorithm 1 and of its evaluation."""

    model: GPTNeo  # p^(0), a plain network
    tokenizer: Tokenizer
    prompt: str
    base: Conditional  # p^(0) after the prompt, packed for sampling
    potential: TextPotential
    log_toxicity: Callable[[list[str]], Tensor]  # a column of the table, whatever the potential is
    encode: similarity.SimilarityScorer
    is_effective: bool = True  # False leaves phi as it is in every generation: an ablation
    exact: ExactSamples | None = None  # exact samples of sigma, if there are any
    exact_vectors: Tensor | None = None  # [M, D] embeddings of the exact samples

    def conditional(self, p: nn.Module, memory: Tensor | None) -> Conditional:
        """The language model p, a GPT-Neo or an adapter of p^(0), whose states remember z."""
        adapter = pack(p) if isinstance(p, Adapter) else None
        network = self.base.model if adapter is not None or p is self.model else pack(p)
        return self.base.with_model(AdaptedGPTNeo(network, memory, adapter))

    def proposal(self, q: nn.Module) -> tuple[Conditional, Twist | None, Conditional | None]:
        """What `draw_round` draws a round of q from: a model, a twist, and p^(0) if it is another.

        An adapter q is a twist of p^(0), so that one pass gives log q and log p^(0).
        """
        if isinstance(q, Adapter):
            return self.conditional(self.model, q.memory), pack(q).tilt, None
        return self.conditional(q, None), None, None if q is self.model else self.base

    def sigma(self, p: nn.Module, psi: nn.Module) -> Sigma:
        """Sigma through phi^(m) (eq. 8) unless p is p^(0). An adapter of psi is taken for p."""
        adapter = getattr(psi, "adapter", None)
        model = p if adapter is None else adapter
        log_potential = base_potential(self.potential)
        if adapter is not None or (p is not self.model and self.is_effective):
            log_potential = effective_potential(self.potential, self.base)
        return Sigma(self.conditional(model, getattr(psi, "memory", None)), log_potential)


def load_setup(config: RunConfig) -> Setup:
    """The three networks on the run's device, and the shipped samples of sigma if they fit."""
    device = config.torch_device()
    dtype = DTYPES[config.dtype]
    model, tokenizer = tinystories.load(config.checkpoint("lm"), device)
    model = model.to(dtype)
    classifier, its_tokenizer = toxicity.load(config.checkpoint("toxicity_model"), device)
    scorer = toxicity.ToxicityScorer(pack(classifier.to(dtype)), its_tokenizer)
    scorer.logits = lru_cache(maxsize=1)(scorer.logits)  # potential and table score the same texts
    encoder, its_tokenizer = similarity.load(config.checkpoint("similarity_model"), device)
    encode = similarity.SimilarityScorer(pack(encoder.to(dtype)), its_tokenizer)
    with tokenizing("the language model"):
        ids = torch.tensor(tokenizer.encode(config.prompt).ids, dtype=torch.long, device=device)
    base = Conditional(pack(model), ids, config.length)

    def decode(rows: list[list[int]]) -> list[str]:
        with tokenizing("the language model"):
            return tokenizer.decode_batch(rows, skip_special_tokens=True)

    potential = TextPotential(make_factors(config.potential, config.beta, scorer), decode, ids)
    potential(ids.repeat(config.length)[None, : config.length])  # fails before files are written
    parts = (model, tokenizer, config.prompt, base, potential, scorer, encode)
    setup = Setup(*parts, config.effective_potential)
    directory = PRESETS[config.preset].target
    if directory is not None and not config.lm and not config.toxicity_model:
        exact = load_target(directory, sigma_key(config), model.config.vocab_size)
        setup.exact = exact and exact.to(device)
    return setup


def sigma_key(config: RunConfig) -> TargetKey:
    """What the sigma of this run depends on."""
    networks = [fingerprint(config.checkpoint(role)) for role in ("lm", "toxicity_model")]
    potential = fingerprints(config.potential)
    return TargetKey(*networks, config.prompt, config.length, config.beta, potential)


def identity(config: RunConfig) -> dict[str, str]:
    """Hashes of the three networks and of the user's own files that a run's results depend on."""
    roles = ("lm", "toxicity_model", "similarity_model")
    hashes = {role: fingerprint(config.checkpoint(role)) for role in roles}
    files = [user_file(spec)[0] for spec in config.potential if user_file(spec)]
    return hashes | {str(path): digest_of(path) for path in files}
