"""What happened in a run of the sampler, recorded from outside: pass a `Trace` as `observer`.

    trace = Trace();  population = tsmc(..., observer=trace)
    trace.ess [T, R]   trace.log_psi, trace.log_w, trace.log_weights, trace.tokens, trace.ancestors [T, R, K]

The genealogy is read off the ancestors afterwards: how many distinct particles of step t have descendants in the final
population. Where it falls to one, all K samples share their first t tokens. T steps, R runs, K particles.
"""

from typing import Protocol

import torch
from torch import Tensor


class Observer(Protocol):
    """Sees every step before its resampling takes effect: tokens [R, K, t], log_psi, log_w and log_weights [R, K], ess [R],
    ancestors [R, K]. Called with the sampler's own tensors: copy what is kept, change nothing."""

    def __call__(
        self,
        t: int,
        tokens: Tensor,
        log_psi: Tensor,
        log_w: Tensor,
        log_weights: Tensor,
        ess: Tensor,
        ancestors: Tensor,
    ) -> None: ...


FIELDS = ("tokens", "log_psi", "log_w", "log_weights", "ess", "ancestors")


class Trace:
    """An `Observer` that keeps every step; each field gains a first axis T once it is read."""

    def __init__(self):
        self.steps: list[dict[str, Tensor]] = []

    def __call__(
        self,
        t: int,
        tokens: Tensor,
        log_psi: Tensor,
        log_w: Tensor,
        log_weights: Tensor,
        ess: Tensor,
        ancestors: Tensor,
    ) -> None:
        """Record step t; a trace serves one call of `tsmc`."""
        if t != len(self.steps) + 1:
            raise ValueError(f"step {t} follows step {len(self.steps)}: record every call of tsmc in a new Trace")
        step = {
            "tokens": tokens[..., -1],
            "log_psi": log_psi,
            "log_w": log_w,
            "log_weights": log_weights,
            "ess": ess,
            "ancestors": ancestors,
        }
        self.steps.append({name: value.clone() for name, value in step.items()})

    def __getattr__(self, name: str) -> Tensor:
        """What was recorded before step t's resampling: `ess` [T, R], the other FIELDS [T, R, K]."""
        if name not in FIELDS:
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

    def samples(self) -> Tensor:
        """The final samples [R, K, T], rebuilt from tokens and genealogy alone."""
        return self.tokens.gather(2, self.lineages()).permute(1, 2, 0)
