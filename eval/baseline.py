"""DPO and GRPO at the cost of the published learner, and the search for their settings.

    unit: one token of one sequence through p^(0); forward with backward counts three
    any other network: its parameters / those of p^(0)

Counted are drawing, reading and learning, not the evaluation. The first position belongs to the
prompt, whose states all rows share, and is left out. A setting (i, j) is a step size 10^(-4 + i/2)
and a strength b = 4^j b_0, b_0 = 0.4 for DPO and 0.16 for GRPO. The search starts from nine
settings and goes on around the best one until its four neighbours have been tried as well.
"""

import itertools
import math
from collections.abc import Callable

import torch
from torch import nn

from distill.dpo import dpo
from distill.finetune import BaselineConfig
from distill.grpo import grpo
from distill.published import PublishedOptions
from eval.run.setup import Setup
from tsmc.interfaces import BaseModel
from twist.mlp import TwistMLP

METHODS = ("dpo-full", "dpo-lora", "grpo-full", "grpo-lora")
FIRST = tuple(itertools.product((0, 1, 2), (-1, 0, 1)))  # settings (i, j) that are tried first
Setting = tuple[int, int]


def size(network: nn.Module) -> int:
    """The parameters of a network."""
    return sum(parameter.numel() for parameter in network.parameters())


def published_units(options: PublishedOptions, generations: int, base: BaseModel) -> int:
    """The cost of the published learner over p^(0) = base.

    From generation 1 on p^(0) reads every sequence for phi^(m) (eq. 8). CTL learns from the outputs
    of psi for the tokens drawn, of which each costs little.
    """
    learned, drawn = options.drawn(generations)
    trained = generations * options.distill_updates * options.distill_batch_size
    read = 0
    if generations and options.effective_potential:
        read = learned * generations // (generations + 1) + drawn * (generations - 1) // generations
    vocab_size, width = base.output_embeddings.shape
    psi, psi_of_tokens = (
        size(TwistMLP(width, options.ctl_hidden_units, outputs, torch.Generator()))
        for outputs in (vocab_size, 1)
    )
    others = (learned + drawn) * psi + 3 * learned * psi_of_tokens
    sequences = learned + drawn + read + 3 * trained + others / size(base.network)
    return round(sequences * (base.length - 1))


def baseline_units(method: str, config: BaselineConfig, length: int) -> int:
    """The cost of a baseline: it draws and trains, DPO on pairs; for GRPO p^(0) reads as well."""
    passes = 4 * config.batch_size + config.batch_size
    if method.startswith("dpo"):
        passes = config.batch_size + 3 * (config.batch_size // 2 * 2)
    return config.updates * passes * (length - 1)


def baseline_config(
    method: str, setting: Setting, units: float, batch_size: int, length: int
) -> BaselineConfig:
    """The options of a baseline with as many updates as `units` pay for, at least one."""
    rate = float(f"{10 ** (-4 + setting[0] / 2):.2g}")
    strength = (0.4 if method.startswith("dpo") else 0.16) * 4.0 ** setting[1]
    one = BaselineConfig(rate, 0.01, strength, updates=1, batch_size=batch_size)
    updates = max(1, int(units // baseline_units(method, one, length)))
    return BaselineConfig(rate, 0.01, strength, updates, batch_size)


def train(
    method: str, setup: Setup, config: BaselineConfig, generator: torch.Generator
) -> BaseModel:
    """The policy of a baseline, trained from p^(0); Diverged where it is not finite."""
    learn = dpo if method.startswith("dpo") else grpo
    return learn(setup.base, setup.potential, config, method.endswith("lora"), generator)


def neighbours(setting: Setting) -> list[Setting]:
    """The settings with the next smaller and the next larger step size or strength."""
    i, j = setting
    return [(i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)]


def search(
    energy: Callable[[Setting], float], first: tuple[Setting, ...], widenings: int
) -> tuple[Setting, bool]:
    """The setting of least energy, and whether its neighbours have all been tried.

    Up to `widenings` times, the neighbours of the best setting that have not been tried are.
    """
    tried = {setting: energy(setting) for setting in first}
    for _ in range(widenings):
        best = min(tried, key=tried.__getitem__)
        missing = [setting for setting in neighbours(best) if setting not in tried]
        if math.isinf(tried[best]) or not missing:
            break
        tried |= {setting: energy(setting) for setting in missing}
    best = min(tried, key=tried.__getitem__)
    return best, tried.keys() >= set(neighbours(best))
