"""DPO and GRPO with as many scores of phi as the published learner, and the search for settings.

A setting (i, j) is a step size 10^(-4 + i/2) and a strength b = 4^j b_0, b_0 = 0.4 for DPO and 0.16
for GRPO. The search starts from nine settings and goes on around the best one until its four
neighbours have been tried as well.
"""

import itertools
import math
from collections.abc import Callable

import torch

from distill.dpo import dpo
from distill.finetune import BaselineConfig
from distill.grpo import grpo
from eval.run.setup import Setup
from tsmc.interfaces import BaseModel

METHODS = ("dpo-full", "dpo-lora", "grpo-full", "grpo-lora")
FIRST = tuple(itertools.product((0, 1, 2), (-1, 0, 1)))  # settings (i, j) that are tried first
Setting = tuple[int, int]


def baseline_config(
    method: str, setting: Setting, scores: float, batch_size: int
) -> BaselineConfig:
    """The options of a baseline with as many updates as `scores` allow, at least one."""
    rate = float(f"{10 ** (-4 + setting[0] / 2):.2g}")
    strength = (0.4 if method.startswith("dpo") else 0.16) * 4.0 ** setting[1]
    return BaselineConfig(rate, 0.01, strength, max(1, int(scores // batch_size)), batch_size)


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
