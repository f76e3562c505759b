"""DPO and GRPO with as many scores of phi as the published learner, and the search for settings.

A setting (i, j) is a step size 10^(-4 + i/2) and a strength b = 4^j b_0, b_0 = 0.4 for DPO and 0.16
for GRPO. The search starts from nine settings and goes on around the best one until its four
neighbours have been tried as well.
"""

import itertools
import math
from collections.abc import Callable

from distill.finetune import BaselineConfig

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


def search(
    energy: Callable[[Setting], float], first: tuple[Setting, ...], widenings: int
) -> tuple[Setting, bool]:
    """The setting of least energy, and whether its neighbours have all been tried.

    Up to `widenings` times, the neighbours of the best setting that have not been tried are.
    """
    tried: dict[Setting, float] = {}
    missing = list(first)
    for _ in range(widenings + 1):
        tried |= {setting: energy(setting) for setting in missing}
        best = min(tried, key=tried.__getitem__)
        i, j = best
        around = [(i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)]
        missing = [setting for setting in around if setting not in tried]
        if math.isinf(tried[best]) or not missing:
            break
    return best, not missing
