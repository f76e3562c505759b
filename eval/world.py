"""What a job starts from: p^(0), the potential, the scorers, and exact samples of the target sigma.

    sigma(s) = p^(0)(s) phi(s) / Z_sigma (eq. 2),   drawn by rejection (`tsmc/rejection.py`)

Exact samples, and the texts of row Base, are kept as tokens [N, T] with log phi [N] and log p [N].
Whoever uses them again scores a few of them again, so a network, a user's file or anything that
such a file reads cannot change unnoticed. Loading comes first, then stored samples, then checks.
N samples, T tokens, D width of an embedding.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval import metrics, scorers
from eval.command import say
from eval.options import DTYPES, POCKET, Options
from tinystories import Conditional, load_model
from tinystories.decoder import NO_END, is_end
from tinystories.files import read_metadata, read_tensors, reading, write_tensors
from tinystories.load import checkpoint_directory, unnamed_ends
from tsmc.estimate import Estimate, mean_estimate
from tsmc.proposal import sample_proposal, sequence_log_probs
from tsmc.rejection import ExactSamples
from twist.factors import CLASSIFIED, load_factors, power
from twist.guards import each_once
from twist.potential import TextPotential, check_potential

SHIPPED = POCKET / "target"
SAMPLES = "samples.safetensors"
# Relative errors of stored numbers: another processor moves them by 1e-6, bfloat16 log p by at most
# .010 and log phi by .042 (930 texts of the preset). A user's own network may be in half precision.
ROUNDING_PHI, ROUNDING_P = 0.05, {torch.float32: 1e-3, torch.bfloat16: 0.02}
NUMBERS = ("num_proposals", "log_z", "log_z_std_error")  # of exact samples


@dataclass(frozen=True)
class Reference:
    """Exact samples of sigma with what the table compares texts and proposals with."""

    exact: ExactSamples
    log_p: Tensor  # [N] log p^(0) of the exact samples
    vectors: Tensor  # [N, D] their embeddings

    def kl_to(self, log_q: Tensor) -> Estimate:
        """KL(sigma||q) in nats from log q [N] of the exact samples."""
        mean = mean_estimate(self.log_p + self.exact.log_phi - log_q)
        # Both errors count as independent, though they come from the same draws: for q = p^(0) and
        # the shipped samples this gives .065, where their covariance would make it .054.
        error = math.hypot(mean.std_error, self.exact.log_z_std_error)
        return Estimate(mean.value - self.exact.log_z, error, mean.dof)


@dataclass
class World:
    """The fixed parts of Algorithm 1 and of its evaluation."""

    base: Conditional  # p^(0) after the prompt
    potential: TextPotential
    scores: dict[str, Callable[[list[str]], Tensor]]  # "toxicity", where phi reads the classifier
    encode: scorers.Runner | None = None  # embeds texts, N texts -> [N, D], for the table
    reference: Reference | None = None  # None where there are no exact samples

    def score(self, tokens: Tensor, group: list[int] | None = None) -> metrics.ScoredTexts:
        """Decode and score sequences tokens [N, T]; without groups each text is its own group."""
        finished = is_end(tokens, self.base.end).any(1).tolist()  # else cut at T
        return self.score_texts(self.potential.texts(tokens), group, finished)

    def score_texts(
        self, texts: list[str], group: list[int] | None = None, finished: list[bool] | None = None
    ) -> metrics.ScoredTexts:
        """The same of N texts, prompt included; all are finished unless it is said of each."""
        scores = {"log_phi": self.potential.of_texts(texts, finished)}
        if finished is not None and self.base.end != NO_END:
            scores["ended"] = torch.tensor(finished).double()
        for name, function in self.scores.items():
            scores[name] = each_once(function, texts, name)
        return metrics.ScoredTexts(texts, scores, group or list(range(len(texts))))

    def describe(self, samples: metrics.ScoredTexts) -> dict:
        """Columns of texts, compared with the exact samples if there are any."""
        exact_vectors = self.reference.vectors if self.reference else None
        return metrics.describe(samples, self.encode(samples.texts), exact_vectors)

    def kl_row(self, log_q: Tensor) -> dict:
        """The column KL, from log q [N] of the exact samples."""
        kl = self.reference.kl_to(log_q)
        return {metrics.KL: kl.value, "kl_half_width": kl.half_width()}

    def set_exact(self, exact: ExactSamples) -> None:
        """Compare with these exact samples from here on."""
        device = self.base.prompt.device
        parts = {"tokens": exact.tokens.to(device), "log_phi": exact.log_phi.to(device)}
        exact = dataclasses.replace(exact, **parts)
        log_p = sequence_log_probs(self.base, exact.tokens)
        self.reference = Reference(exact, log_p, self.encode(self.potential.texts(exact.tokens)))


def load_world(options: Options, folder: Path | None = None) -> World:
    """`load_plain_world`, the sentence encoder, and exact samples: those of --target, those that
    the job in a folder has drawn, or the shipped ones where they are of this sigma.

    ValueError where they are of another, or where texts of the job have other scores than before.
    """
    directory = target_directory(options, folder)
    exact, sigma = load_target(directory)
    other = [name for name, value in sigma_of(options).items() if sigma.get(name) != value]
    fault = f"holds samples of another sigma, whose {other[0]} differs" if other else ""
    is_own = usable_or_refused(directory, fault)
    path = checkpoint_directory(options.similarity_model, "--similarity-model")
    world = load_plain_world(options)
    device = world.base.prompt.device
    encoder, words = scorers.load_scorer(scorers.SentenceEncoder, path, device)
    world.encode = scorers.Runner(encoder.to(DTYPES[options.dtype]), words)
    check_potential(world.base, world.potential, torch.Generator(device).manual_seed(options.seed))
    if folder is not None:
        check_unchanged(folder, world)
    if is_own and usable_or_refused(directory, change_of(world, directory / SAMPLES)):
        world.set_exact(exact)
    return world


def load_plain_world(options: Options) -> World:
    """The language model and what its potential reads, on the job's device."""
    device, dtype = options.torch_device(), DTYPES[options.dtype]
    factors = load_factors(options.potential)
    if not options.end and any(spec.partition("~")[0] == "ended" for spec in factors):
        raise ValueError("--potential ended: no token finishes a text; name one with --end")
    is_classified = bool(set(CLASSIFIED) & set(options.potential))
    # Names are looked at before the networks take their time.
    checkpoint_directory(options.lm, "--lm")
    if is_classified:  # else the classifier is not loaded
        path = checkpoint_directory(options.toxicity_model, "--toxicity-model")
    say("loading the networks")
    given = (options.prompt, options.length, options.end, device, dtype)
    base, tokenizer = load_model(options.lm, "--lm", *given)
    scores = {}
    if is_classified:
        classifier, words = scorers.load_scorer(scorers.ToxicityClassifier, path, device)
        scorer = scorers.ToxicityScorer(classifier.to(dtype), words)
        factors["toxicity"] = power(scorer, options.beta)
        factors["nontoxicity"] = power(scorer.log_nontoxic, options.beta)
        scores["toxicity"] = lambda texts: scorer(texts).double().exp()
    decode = partial(tokenizer.decode_batch, skip_special_tokens=True)
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
    chosen = [factors[spec] for spec in options.potential]
    potential = TextPotential(chosen, decode, base.prompt, base.end, encode)
    check_written(factors, tokenizer)
    tell_unfinished_word(options.prompt, base, potential)
    if not options.end:
        ends = unnamed_ends(base, tokenizer, checkpoint_directory(options.lm, "--lm"))
        drawn = sample_proposal(base, None, 64, torch.Generator(device).manual_seed(0)).tokens
        if share := is_end(drawn, tuple(ends)).any(1).double().mean().item():
            named = " ".join(repr(tokenizer.id_to_token(end)) for end in ends)
            say(f"p ends {share:.0%} of its texts, and goes on unseen; give --end {named}")
    return World(base, potential, scores)


def target_directory(options: Options, folder: Path | None) -> Path:
    """Where exact samples are looked for; ValueError where --target has none."""
    if options.target:
        directory = Path(options.target)
        if not (directory / SAMPLES).exists():
            fault = f"--target {directory}: there is no {SAMPLES}"
            raise ValueError(f"{fault}; name the folder target/ of a job that has drawn some")
        return directory
    own = folder / "target" if folder else SHIPPED
    return own if (own / SAMPLES).exists() else SHIPPED


def sigma_of(options: Options) -> dict[str, Any]:
    """The options that sigma depends on, beside its networks, as JSON has them."""
    is_classified = bool(set(CLASSIFIED) & set(options.potential))
    names = ("prompt", "length", "beta") if is_classified else ("prompt", "length")
    sigma = {name: getattr(options, name) for name in names}
    return sigma | {name: list(getattr(options, name)) for name in ("end", "potential")}


def save_target(directory: Path, world: World, options: Options) -> None:
    """Write the exact samples of a world, with the options of their sigma."""
    exact = world.reference.exact
    tensors = {"tokens": exact.tokens.to(torch.int32), "log_phi": exact.log_phi}
    tensors["log_p"] = world.reference.log_p
    values = sigma_of(options) | {name: getattr(exact, name) for name in NUMBERS}
    write_tensors(directory / SAMPLES, tensors, target=json.dumps(values))


def load_target(directory: Path) -> tuple[ExactSamples, dict[str, Any]]:
    """The exact samples of a directory, and the options of their sigma; ValueError if damaged."""
    path = directory / SAMPLES
    stored, metadata = read_tensors(path), read_metadata(path)
    with reading(path, "holds no exact samples", "make it anew, or leave --target out"):
        sigma = json.loads(metadata["target"])
        count, *numbers = [sigma.pop(name) for name in NUMBERS]
        tokens, log_phi, log_p = (stored[name] for name in ("tokens", "log_phi", "log_p"))
        if tokens.ndim != 2 or tokens.is_floating_point() or tokens.min() < 0:
            raise ValueError("its tokens are no whole numbers [N, T]")
        if not len(tokens) == len(log_phi) == len(log_p) > 1:
            raise ValueError("it needs at least two samples, with log_phi and log_p of each")
        if not all(math.isfinite(number) for number in numbers) or count < len(tokens):
            raise ValueError(f"{', '.join(NUMBERS)} are {[count, *numbers]}")
        return ExactSamples(tokens.long(), log_phi, count, *numbers), sigma


def check_written(factors: dict[str, Any], tokenizer: Any) -> None:
    """ValueError for a hint that the language model has no tokens for."""
    for spec, factor in factors.items():
        for hint in getattr(factor, "hints", []):
            ids = tokenizer.encode(f"a {hint}", add_special_tokens=False).ids
            if hint.lower() not in tokenizer.decode(ids).lower():
                fault = f"--potential {spec}: the tokenizer of --lm cannot write {hint!r}"
                raise ValueError(f"{fault}; no text of the language model has it")


def tell_unfinished_word(prompt: str, base: Conditional, potential: TextPotential) -> None:
    """Say where the prompt ends inside a word, whose tokens are others than those of the whole."""
    likely = base.head(base.decoder(1).hidden)[0].softmax(-1).topk(min(20, base.vocab_size))
    nexts = potential.continuations(potential.texts(likely.indices[:, None]))
    goes_on = torch.tensor([text[:1].isalnum() and text.isascii() for text in nexts])
    if prompt[-1].isalnum() and likely.values.cpu()[goes_on].sum() > 0.5:
        word = nexts[int(goes_on.nonzero()[0])]
        say(f"p mostly goes on with the last word of --prompt, as by {word!r}; finish that word")


def usable_or_refused(directory: Path, fault: str) -> bool:
    """Whether exact samples have no fault; ValueError for a fault of any but the shipped ones,
    which are then not used."""
    if fault and directory != SHIPPED:
        remedy = "restore what it was drawn with, or name another --target, or begin a new job"
        raise ValueError(f"{directory}: {fault}; {remedy}")
    return not fault


def checked_rows(log_phi: Tensor) -> Tensor:
    """Which of N stored texts are scored again: those of the largest phi, and some of all."""
    largest = log_phi.argsort(descending=True, stable=True)[:8].cpu()
    return torch.cat([largest, torch.arange(0, len(log_phi), -(-len(log_phi) // 8))]).unique()


def change_of(world: World, path: Path) -> str:
    """What of the tokens [N, T], log_phi [N], log_p [N] in a file is no longer so, or "".

    Where the file has vectors [N, D], the sentence encoder is checked too.
    """
    stored = read_tensors(path)
    rows = checked_rows(stored["log_phi"])
    tokens = stored["tokens"][rows].long().to(world.base.prompt.device)
    if tokens.shape[1] != world.base.length or tokens.max() >= world.base.vocab_size:
        return "its texts are of another length or another vocabulary"
    scores = {"log_phi": world.potential(tokens), "log_p": sequence_log_probs(world.base, tokens)}
    dtype = next(world.base.network.parameters()).dtype
    for name, values in scores.items():
        now, then = values.cpu().double(), stored[name][rows].double()
        gap = (now - then).abs() / then.abs().clamp(min=1.0)  # [n]
        gap = gap.where(now != then, 0.0)  # where both are -inf
        if not gap.max() <= (ROUNDING_PHI if name == "log_phi" else ROUNDING_P[dtype]):
            n = gap.argmax()
            return f"{name} of one of its texts is {now[n]:.5g} now, and was {then[n]:.5g}"
    if "vectors" in stored and world.encode is not None:
        now, then = world.encode(world.potential.texts(tokens)), stored["vectors"]
        if now.shape != then.shape or (now * then).sum(1).min() < 0.99:
            return "the sentence encoder gives other vectors of its texts"
    return ""


def check_unchanged(folder: Path, world: World) -> None:
    """ValueError where texts of a job's row Base have other scores than when it was made."""
    path = folder / "base" / SAMPLES
    if path.exists() and (fault := change_of(world, path)):
        remedy = "restore the networks and files that the job was made with, or begin a new one"
        raise ValueError(f"{path}: {fault}; {remedy}")
