"""What a run starts from: p^(0), the potential, exact samples of sigma after each prompt, the scorers of the table."""

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

import tinystories
from eval.run.directory import RunDirectory
from eval.run.options import DTYPES, PRESETS, RunConfig
from eval.run.state import digest_of
from eval.run.target import Target, TargetKey, draw_target, load_target, save_target, target_key
from eval.scorers import similarity, toxicity
from eval.scorers.potentials import fingerprints, make_factors, user_file
from tinystories import Conditional, GPTNeo
from tinystories.checkpoint import fingerprint
from tsmc.sampler import Sigma
from twist import TextPotential, base_potential, effective_potential


@dataclass
class Problem:
    """Sigma after one prompt, which every generation shares; target holds exact samples of it, if there are any.

    `name` tells the prompts of a run apart in its files: empty for the first, "prompt-2" for the next.
    """

    name: str
    prompt: str
    base: Conditional
    potential: TextPotential
    toxicity: toxicity.ToxicityScorer  # a measure of the table, whatever the potential is
    target: Target | None


@dataclass
class Ingredients:
    """The fixed parts of Algorithm 1 and of its evaluation."""

    model: GPTNeo
    tokenizer: Tokenizer
    problems: list[Problem]
    encode: similarity.SimilarityScorer
    effective: bool = True  # False leaves phi as it is in every generation: the ablation of phi^(m)

    def sigmas(self, model: GPTNeo | None = None) -> list[Sigma]:
        """Sigma after each prompt as p^(m) = model sees it: through phi^(m), or for p^(0) (None) through phi itself."""
        sigmas = []
        for problem in self.problems:
            log_potential = base_potential(problem.potential)
            if model is not None and self.effective:
                log_potential = effective_potential(problem.potential, problem.base)
            conditional = (
                problem.base if model is None else Conditional(model, problem.base.prompt, problem.base.length)
            )
            sigmas.append(Sigma(conditional, log_potential))
        return sigmas


def load_ingredients(config: RunConfig) -> Ingredients:
    """The three networks on the run's device, and the shipped samples of sigma where there are any for these options.

    InputError names the option or file that is at fault.
    """
    device, dtype = config.torch_device(), DTYPES[config.dtype]
    model, tokenizer = tinystories.load(config.checkpoint("lm"), device)
    classifier, its_tokenizer = toxicity.load(config.checkpoint("toxicity_model"), device)
    scorer = toxicity.ToxicityScorer(classifier.to(dtype), its_tokenizer)
    encoder, its_tokenizer = similarity.load(config.checkpoint("similarity_model"), device)
    encode = similarity.SimilarityScorer(encoder.to(dtype), its_tokenizer)
    model = model.to(dtype)
    factors = make_factors(config.potential, config.beta, scorer)
    problems = []
    for number, prompt in enumerate(dict.fromkeys(config.prompt), 1):
        ids = torch.tensor(tokenizer.encode(prompt).ids, dtype=torch.long, device=device)
        base = Conditional(model, ids, config.length)
        potential = TextPotential(factors, tokenizer, ids)
        potential(ids.repeat(config.length)[None, : config.length])  # a mistake in it shows before anything is written
        name = "" if number == 1 else f"prompt-{number}"
        target = shipped_target(config, prompt)
        problems.append(Problem(name, prompt, base, potential, scorer, target and target.to(device)))
    return Ingredients(model, tokenizer, problems, encode, config.effective_potential)


def sigma_key(config: RunConfig, prompt: str) -> TargetKey:
    """What the sigma of this run depends on after one prompt."""
    lm, classifier = config.checkpoint("lm"), config.checkpoint("toxicity_model")
    return target_key(lm, classifier, prompt, config.length, config.beta, fingerprints(config.potential))


def shipped_target(config: RunConfig, prompt: str) -> Target | None:
    """The exact samples that come with the preset, if they are of this sigma."""
    shipped = PRESETS[config.preset].target if config.uses_preset_checkpoints() else None
    return None if shipped is None else load_target(shipped, sigma_key(config, prompt))


def identity(config: RunConfig) -> dict[str, str]:
    """Hashes of the three networks and of the user's own files that a run's results depend on."""
    files = [place[0] for place in map(user_file, config.potential) if place is not None]
    networks = {role: fingerprint(config.checkpoint(role)) for role in ("lm", "toxicity_model", "similarity_model")}
    return networks | {str(path): digest_of(path) for path in files}


def exact_samples(config: RunConfig, problem: Problem, run: RunDirectory) -> Target | None:
    """Exact samples of sigma on the run's device: the shipped ones, or else drawn now and kept in the run.

    None where the options want none.
    """
    target, proposals = problem.target, config.eval.target_proposals
    if target is None and proposals == 0:
        return None
    if target is None:
        streams, phase = config.streams("target", problem.prompt), run.phase("target by rejection", None, problem.name)
        target = draw_target(problem.base, problem.potential, proposals, streams, phase, config.rows)
        if run.writes:
            save_target(run.path / "target" / problem.name, target, sigma_key(config, problem.prompt))
    return target
