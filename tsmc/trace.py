"""What happened in a run of the sampler, recorded from outside: pass a `Trace` as `observer`.

    trace = Trace();  population = tsmc(..., observer=trace)
    trace.ess, trace.log_z [T, R]   trace.log_psi, trace.log_w, trace.log_weights, trace.tokens, trace.ancestors [T, R, K]

log_z is log Z-hat as it runs: the evidence of all resamplings before step t, and log-mean-exp of the weights gathered since.
At t = T it is the population's.

The genealogy is read off the ancestors afterwards: how many distinct particles of step t have descendants in the final
population. Where it falls to one, all K samples share their first t tokens. T steps, R runs, K particles.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tsmc.weights import log_mean_exp

if TYPE_CHECKING:
    from tsmc.sampler import Particles


FIELDS = ("log_psi", "log_w", "log_weights", "ess")


class Trace:
    """An `Observer` that keeps every step; each field gains a first axis T once it is read."""

    def __init__(self):
        self.steps: list[dict[str, Tensor]] = []

    def __call__(self, particles: "Particles", ancestors: Tensor) -> None:
        """Record a step; a trace serves one call of `tsmc`."""
        t = particles.tokens.shape[-1]
        if t != len(self.steps) + 1:
            raise ValueError(f"step {t} follows step {len(self.steps)}: record every call of tsmc in a new Trace")
        step = {name: getattr(particles, name) for name in FIELDS}
        step |= {"tokens": particles.tokens[..., -1], "ancestors": ancestors}
        step["log_z"] = particles.log_z + log_mean_exp(particles.log_weights)
        self.steps.append({name: value.clone() for name, value in step.items()})

    def __getattr__(self, name: str) -> Tensor:
        """What was recorded before step t's resampling: `ess` and `log_z` [T, R], the others [T, R, K]."""
        if name not in (*FIELDS, "tokens", "ancestors", "log_z"):
            raise AttributeError(name)
        return torch.stack([step[name] for step in self.steps])

    def lineages(self) -> Tensor:
        """Which particle of step t each final sample descends from [T, R, K]."""
        lines = [self.steps[-1]["ancestors"]]
        for step in reversed(self.steps[:-1]):
            lines.append(step["ancestors"].gather(1, lines[-1]))
        return torch.stack(lines[::-1])

    def unique_ancestors(self) -> Tensor:
        """How many distinct particles of step t have descendants among the final samples [T, R]."""
        lines = self.lineages().sort(-1).values
        return 1 + (lines.diff(dim=-1) > 0).sum(-1)
