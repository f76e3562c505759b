"""The potential and the effective potential.

    log phi(s_{1:T})     = sum of the factors' log phi, by default beta * log p(toxic | s)       (paper, Sec. 3, "Setup")
    log phi^(m)(s_{1:T}) = log p^(0)(s_{1:T}) + log phi(s_{1:T}) - log p^(m)(s_{1:T})            eq. 8

The second keeps the target sigma, proportional to p^(0) phi, the same for every generation: p^(m) phi^(m) = p^(0) phi.
A factor is any callable to log phi [N], so this file knows no classifier. N sequences, T tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tsmc.proposal import LanguageModel
from tsmc.sampler import LogPotential
from tsmc.scoring import sequence_log_probs

READS = ("texts", "continuations", "tokens")
"""What a factor can read: N texts with the prompt, N texts without it, or the continuations as a tensor [N, T]."""


@dataclass(frozen=True)
class Factor:
    """One factor of a potential, and what it reads."""

    log_phi: Callable[..., Tensor]  # one argument -> log phi [N]; at most 0 where exact samples are drawn by rejection
    reads: str = "texts"


def each_once(function: Callable[[list[str]], Tensor], texts: Sequence[str]) -> Tensor:
    """function(texts) [N], called with the distinct texts only."""
    place = {text: index for index, text in enumerate(dict.fromkeys(texts))}
    return function(list(place))[torch.tensor([place[text] for text in texts], dtype=torch.long)]


class TextPotential:
    """log phi of continuation tokens (eq. 2): the product of its factors, each of which sees every distinct text once."""

    def __init__(self, factors: Sequence[Factor], decode: Callable[[list[list[int]]], list[str]], prompt: Tensor):
        """`decode` makes texts of rows of tokens; `prompt` [P] stands before every continuation."""
        self.factors, self.decode, self.prompt = factors, decode, prompt.tolist()

    def texts(self, tokens: Tensor) -> list[str]:
        """The texts, prompt included, of continuations tokens [N, T]."""
        return self.decode([self.prompt + row for row in tokens.tolist()])

    def __call__(self, tokens: Tensor) -> Tensor:
        """log phi [N] of tokens [N, T]"""
        texts = self.texts(tokens)
        start = len(self.decode([self.prompt])[0])
        log_phi = torch.zeros(len(tokens), device=tokens.device)
        for factor in self.factors:
            if factor.reads == "tokens":
                log_factor = factor.log_phi(tokens)
            else:
                read = texts if factor.reads == "texts" else [text[start:] for text in texts]
                log_factor = each_once(factor.log_phi, read)
            log_phi = log_phi + log_factor.to(tokens.device)
        return log_phi


def base_potential(log_phi: Callable[[Tensor], Tensor]) -> LogPotential:
    """phi as the samplers take it at generation 0, where p^(0) is the model that is sampled."""
    return lambda tokens, log_p: log_phi(tokens)


def effective_potential(log_phi: Callable[[Tensor], Tensor], base: LanguageModel) -> LogPotential:
    """phi^(m) (eq. 8): one teacher-forced pass of the base model over the sequences, whatever p^(m) gave them log_p [N]."""
    return lambda tokens, log_p: sequence_log_probs(base, tokens) + log_phi(tokens) - log_p
