"""What happened in a run of the sampler, recorded by passing a `Trace` as `observer`.

    population = tsmc(..., observer=trace)
    trace.ess, trace.log_z                                                  [T, R]
    trace.log_psi, .log_w, .log_weights, .tokens, .ancestors                [T, R, K]

`Step` describes each of them. The genealogy follows from the ancestors: where one particle of step
t has descendants, all K samples share their first t tokens. T steps, R runs, K particles.
"""

import torch
from torch import Tensor

from tsmc.sampler import Step


class Trace:
    """An observer that keeps every step; each field gains a first axis T once it is read."""

    def __init__(self):
        self.steps: list[dict[str, Tensor]] = []

    def __call__(self, step: Step) -> None:
        """Record a step."""
        assert step.tokens.shape[-1] == len(self.steps) + 1, "give each call of tsmc a new Trace"
        values = vars(step) | {"tokens": step.tokens[..., -1]}
        self.steps.append({name: value.clone() for name, value in values.items()})

    def __getattr__(self, name: str) -> Tensor:
        """What was recorded before each resampling: `ess` and `log_z` [T, R], others [T, R, K]."""
        if name not in Step.__annotations__:
            raise AttributeError(name)
        return torch.stack([step[name] for step in self.steps])

    def lineages(self) -> Tensor:
        """Which particle of step t each final sample descends from [T, R, K]."""
        lines = [self.steps[-1]["ancestors"]]
        for step in reversed(self.steps[:-1]):
            lines.append(step["ancestors"].gather(1, lines[-1]))
        return torch.stack(lines[::-1])
