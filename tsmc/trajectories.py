"""Whole sequences drawn from the proposal, without resampling: s_{1:T} ~ q = prod_t q_t. N sequences, T steps, D width."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tsmc.categorical import uniforms
from tsmc.interfaces import LanguageModel, Twist
from tsmc.proposal import propose


@dataclass
class Trajectories:
    """N independent sequences from q, [N, T] each, and the hidden states [N, T, D] that the twist saw."""

    tokens: Tensor
    log_p: Tensor
    log_psi: Tensor
    log_q: Tensor
    hidden: Tensor | None


def sample_proposal(
    model: LanguageModel, twist: Twist | None, rows: int, generator: torch.Generator, keep_hidden: bool = False
) -> Trajectories:
    """Draw N = rows sequences i.i.d. from q, without resampling; twist None samples the model itself."""
    return trajectories(model, twist, uniforms(model.length * rows, 1, generator).view(-1, rows, 1), keep_hidden)


@torch.no_grad()
def trajectories(
    model: LanguageModel, twist: Twist | None, uniform: Tensor, keep_hidden: bool, forced: Tensor | None = None
) -> Trajectories:
    """The N sequences of q that uniform numbers [T, N, 1] stand for; a row of them depends on no other row.

    Where forced [N, T] is not negative it gives the token, whose probabilities are then those of that token.
    """
    decoder = model.decoder(uniform.shape[1])
    steps, hidden = [], []
    for t in range(model.length):
        if keep_hidden:
            hidden.append(decoder.states[decoder.state_of])
        steps.append(propose(decoder, twist, uniform[t], None if forced is None else forced[:, t]))
        if t < model.length - 1:
            decoder.extend(steps[-1].tokens)
    names = ("tokens", "log_p", "log_psi", "log_q")
    stacked = {name: torch.stack([getattr(step, name) for step in steps], 1) for name in names}  # [N, T] each
    return Trajectories(**stacked, hidden=torch.stack(hidden, 1) if keep_hidden else None)
