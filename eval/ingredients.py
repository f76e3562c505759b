"""What a run starts from: p^(0) after the prompt, the potential, the sentence encoder, exact samples of sigma."""

from dataclasses import dataclass

import torch

import tinystories
from config import PRESETS, RunConfig
from eval import similarity, toxicity
from eval.run import RunDirectory
from eval.target import Target, TargetKey, draw_target, load_target, save_target, target_key
from tinystories import Conditional
from twist import TextPotential


@dataclass
class Ingredients:
    """The fixed parts of Algorithm 1 and of its evaluation."""

    base: Conditional
    potential: TextPotential
    encode: similarity.SimilarityScorer
    target: Target | None


def load_ingredients(config: RunConfig) -> Ingredients:
    """The three networks on the run's device, and the shipped samples of sigma where there are any for these options.

    InputError names the option or file that is at fault.
    """
    device = config.torch_device()
    model, tokenizer = tinystories.load(config.checkpoint("lm"), device)
    prompt = torch.tensor(tokenizer.encode(config.prompt).ids, dtype=torch.long, device=device)
    base = Conditional(model, prompt, config.length)
    classifier = toxicity.ToxicityScorer(*toxicity.load(config.checkpoint("toxicity_model"), device))
    encoder = similarity.SimilarityScorer(*similarity.load(config.checkpoint("similarity_model"), device))
    shipped = PRESETS[config.preset].target if config.uses_preset_checkpoints() else None
    target = load_target(shipped, sigma_key(config)) if shipped is not None else None
    return Ingredients(base, TextPotential(classifier, tokenizer, prompt, config.beta), encoder, target)


def sigma_key(config: RunConfig) -> TargetKey:
    """What the sigma of this run depends on."""
    lm, classifier = config.checkpoint("lm"), config.checkpoint("toxicity_model")
    return target_key(lm, classifier, config.prompt, config.length, config.beta)


def exact_samples(config: RunConfig, given: Ingredients, run: RunDirectory) -> Target:
    """Exact samples of sigma on the run's device: the shipped ones, or else drawn now and kept in the run."""
    target = given.target
    if target is None:
        proposals = config.eval.target_proposals
        with run.progress("target by rejection", None, proposals) as report:
            target = draw_target(given.base, given.potential, proposals, config.generator("target"), report)
        save_target(run.path / "target", target, sigma_key(config))
    return target.to(given.base.prompt.device)
