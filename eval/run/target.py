"""Exact samples of the target sigma and what they cost: the file under `checkpoints/pocket/target`.

    sigma(s) = p^(0)(s) phi(s) / Z_sigma,   log phi(s) = beta log p(toxic | s)

Drawn by rejection, which is exact because phi <= 1. The file names the fingerprints of the language model and of the
classifier that made it; samples of other checkpoints are of another sigma, so a stale file is refused.
`python -m eval.target --help` says how to make it anew. N samples, T tokens.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

import tinystories
from eval.run import processes as ranks
from eval.scorers import toxicity
from tinystories.checkpoint import fingerprint, read_json, read_tensors, write_json, write_tensors
from tinystories.errors import InputError
from tinystories.memory import keep_freed_memory
from tsmc.proposal import LanguageModel
from tsmc.rejection import log_mean_with_error, propose_and_accept
from tsmc.steps import Phase
from twist import TextPotential

REMAKE = "make it anew with python -m eval.target"


@dataclass(frozen=True)
class TargetKey:
    """What sigma depends on."""

    lm: str  # fingerprint
    toxicity: str  # fingerprint
    prompt: str
    length: int
    beta: float
    potential: list[str] = field(default_factory=lambda: ["toxicity"])  # factors, a user's file by its hash


@dataclass(frozen=True)
class Target:
    """Exact samples of sigma and the evidence of the proposals they were accepted from."""

    tokens: Tensor  # [N, T]
    log_phi: Tensor  # [N]
    num_proposals: int
    log_z: float
    log_z_std_error: float

    def to(self, device: torch.device) -> "Target":
        """The same with its tensors on `device`."""
        return replace(self, tokens=self.tokens.to(device), log_phi=self.log_phi.to(device))


def target_key(
    lm: Path, classifier: Path, prompt: str, length: int, beta: float, potential: Sequence[str] = ("toxicity",)
) -> TargetKey:
    """The key of the sigma that these checkpoints and options define."""
    return TargetKey(fingerprint(lm), fingerprint(classifier), prompt, length, beta, list(potential))


def draw_target(
    model: LanguageModel,
    log_phi: Callable[[Tensor], Tensor],
    num_proposals: int,
    streams: Callable[[int], torch.Generator],
    phase: Phase,
    chunk: int = 1000,
) -> Target:
    """Rejection sampling of sigma in chunks, each with a random stream of its own; InputError where nothing was accepted."""
    sizes = ranks.chunk_sizes(num_proposals, chunk)

    def work(i: int) -> dict[str, Tensor]:
        part = propose_and_accept(model, log_phi, sizes[i], streams(i))
        return {"tokens": part.tokens, "log_phi": part.log_phi, "accepted": part.accepted.byte()}

    kept: list[Tensor] = []  # of each round the accepted sequences [A, T]
    kept_log_phi: list[Tensor] = []
    every_log_phi: list[Tensor] = []
    state = {"kept": kept, "kept_log_phi": kept_log_phi, "every_log_phi": every_log_phi}
    for step in phase.steps(ranks.rounds(len(sizes)), **state):
        part = ranks.one_each(step, sizes, work)
        accepted = part["accepted"].bool()
        kept.append(part["tokens"][accepted])
        kept_log_phi.append(part["log_phi"][accepted])
        every_log_phi.append(part["log_phi"])
        phase.report(accepted=sum(map(len, kept)))
    if sum(map(len, kept)) < 2:
        words = f"{sum(map(len, kept))} of {num_proposals} base samples were accepted"
        soften = "lower --beta or soften --potential"
        remedy = f"raise --eval-target-proposals, {soften}, or do without exact samples by --eval-target-proposals 0"
        raise InputError(f"{words}; {remedy}")
    return Target(
        torch.cat(kept), torch.cat(kept_log_phi), num_proposals, *log_mean_with_error(torch.cat(every_log_phi))
    )


def save_target(directory: Path, target: Target, key: TargetKey, **notes) -> None:
    """Write `samples.safetensors` and `target.json`, with `notes` beside the numbers."""
    tensors = {"tokens": target.tokens.to(torch.int32), "log_phi": target.log_phi.float()}
    write_tensors(directory / "samples.safetensors", tensors)
    numbers = {
        "num_samples": len(target.tokens),
        "num_proposals": target.num_proposals,
        "log_z": target.log_z,
        "log_z_std_error": target.log_z_std_error,
    }
    write_json(directory / "target.json", {"key": asdict(key), **numbers, **notes})


def load_target(directory: Path, key: TargetKey) -> Target | None:
    """The samples, or None where they belong to other options (prompt, length, beta, potential).

    InputError where they belong to other checkpoints than `key` names, or where the two files do not fit each other.
    """
    path = Path(directory) / "target.json"
    raw = read_json(path)
    try:
        made_for = TargetKey(**raw["key"])
        numbers = {name: raw[name] for name in ("num_proposals", "log_z", "log_z_std_error")}
        count = raw["num_samples"]
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: not a target file ({error!r}); {REMAKE}") from error
    for role in ("lm", "toxicity"):
        if getattr(made_for, role) != getattr(key, role):
            raise InputError(f"{path}: stale, it was made for another {role} checkpoint; {REMAKE}")
    if made_for != key:
        return None
    tensors = read_tensors(path.with_name("samples.safetensors"))
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if shapes != {"tokens": [count, key.length], "log_phi": [count]}:
        raise InputError(f"{path.with_name('samples.safetensors')}: does not fit target.json; {REMAKE}")
    return Target(tokens=tensors["tokens"].long(), log_phi=tensors["log_phi"], **numbers)


def parse_arguments() -> argparse.Namespace:
    """Command line of this script."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    pocket = Path("checkpoints/pocket")
    parser.add_argument("--lm", type=Path, default=pocket / "lm", help="language model directory")
    parser.add_argument("--toxicity-model", type=Path, default=pocket / "toxicity", help="classifier directory")
    parser.add_argument("--out", type=Path, default=pocket / "target", help="directory to write to")
    parser.add_argument("--prompt", default="Once upon a time, there was a", help="s_0")
    parser.add_argument("--length", type=int, default=20, help="T, tokens of a continuation")
    parser.add_argument("--beta", type=float, default=10.0, help="strength of the potential")
    parser.add_argument("--proposals", type=int, default=900_000, help="base samples to draw")
    parser.add_argument("--seed", type=int, default=0, help="seed")
    return parser.parse_args()


class Printed(Phase):
    """Says now and then how far the drawing has come."""

    def __init__(self):
        self.began, self.chunks = time.time(), 0

    def report(self, **figures: float) -> None:
        """A line every 50 chunks."""
        self.chunks += 1
        if self.chunks % 50 == 0:
            print(f"{self.chunks} chunks, {figures['accepted']} accepted, {time.time() - self.began:.0f} s", flush=True)


class Tally:
    """log phi from log p(toxic | s), which it remembers: the regime is judged by it."""

    def __init__(self, log_score: TextPotential, beta: float):
        self.log_score, self.beta = log_score, beta
        self.log_scores: list[Tensor] = []

    def __call__(self, tokens: Tensor) -> Tensor:
        """log phi [N] of tokens [N, T]"""
        self.log_scores.append(self.log_score(tokens))
        return self.beta * self.log_scores[-1]

    def summary(self) -> dict[str, float]:
        """Mean toxicity of the base samples, with its standard error, and acceptance at beta 1 and 10."""
        score = torch.cat(self.log_scores).double().exp()
        error = score.std().item() / math.sqrt(len(score))
        acceptance = {f"acceptance_beta_{beta}": score.pow(beta).mean().item() for beta in (1, 10)}
        return {"base_toxicity": score.mean().item(), "base_toxicity_std_error": error, **acceptance}


def make_target(args: argparse.Namespace) -> None:
    """Draw the samples, write the two files, print the figures."""
    if not (args.beta >= 0 and math.isfinite(args.beta) and args.length >= 1 and args.proposals >= 2):
        raise InputError("--beta, --length or --proposals is out of range; give at least 0, 1 and 2")
    keep_freed_memory()
    model, tokenizer = tinystories.load(args.lm)
    classifier = toxicity.ToxicityScorer(*toxicity.load(args.toxicity_model), batch_size=256)
    prompt = torch.tensor(tokenizer.encode(args.prompt).ids)
    tally = Tally(TextPotential([classifier], tokenizer, prompt), args.beta)
    conditional = tinystories.Conditional(model, prompt, args.length)
    generator = torch.Generator().manual_seed(args.seed)
    target = draw_target(conditional, tally, args.proposals, lambda chunk: generator, Printed())
    key = target_key(args.lm, args.toxicity_model, args.prompt, args.length, args.beta)
    save_target(args.out, target, key, seed=args.seed, **tally.summary())
    print(f"{len(target.tokens)} samples, log Z {target.log_z:.4f} +- {target.log_z_std_error:.4f}", tally.summary())


def main() -> None:
    """Command line to files; bad input ends with one line and exit code 2."""
    try:
        make_target(parse_arguments())
    except InputError as error:
        print(f"eval.target: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
