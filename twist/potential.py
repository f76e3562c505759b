"""The potential and the effective potential.

    log phi(s_{1:T})     = sum of the factors' log phi, by default beta * log p(toxic | s)       (paper, Sec. 3, "Setup")
    log phi^(m)(s_{1:T}) = log p^(0)(s_{1:T}) + log phi(s_{1:T}) - log p^(m)(s_{1:T})            (paper, Sec. 2, Phase 2)

The second keeps the target sigma, proportional to p^(0) phi, the same for every generation: p^(m) phi^(m) = p^(0) phi.
A factor is any callable to log phi [N], so this file knows no classifier. The name of its first parameter says what it reads:

    tokens           continuations as a tensor [N, T]
    continuations    N texts without the prompt
    any other name   N texts, prompt included

N sequences, T tokens.
"""

import inspect
from collections.abc import Callable, Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tsmc.proposal import LanguageModel, sequence_log_probs
from tsmc.sampler import LogPotential

Factor = Callable[..., Tensor]
"""One argument, named for what it reads -> log phi [N]; at most 0 where exact samples are drawn by rejection."""


def first_parameter(factor: Factor) -> str:
    """The name of what a factor is called with; empty where Python cannot tell."""
    try:
        return next(iter(inspect.signature(factor).parameters), "")
    except (TypeError, ValueError):
        return ""


def each_once(function: Callable[[list[str]], Tensor], texts: Sequence[str]) -> Tensor:
    """function(texts) [N], called with the distinct texts only."""
    distinct = {text: index for index, text in enumerate(dict.fromkeys(texts))}
    return function(list(distinct))[torch.tensor([distinct[text] for text in texts], dtype=torch.long)]


class TextPotential:
    """log phi of continuation tokens: the product of its factors, each of which sees every distinct text once."""

    def __init__(self, factors: Sequence[Factor], tokenizer: Tokenizer, prompt: Tensor):
        self.factors, self.tokenizer = factors, tokenizer
        self.prompt = prompt.tolist()

    def texts(self, tokens: Tensor) -> list[str]:
        """The texts, prompt included, of continuations tokens [N, T]; end-of-text leaves no trace in them."""
        return self.tokenizer.decode_batch([self.prompt + row for row in tokens.tolist()], skip_special_tokens=True)

    def __call__(self, tokens: Tensor) -> Tensor:
        """log phi [N] of tokens [N, T]"""
        texts = self.texts(tokens)
        start = len(self.tokenizer.decode(self.prompt, skip_special_tokens=True))
        log_phi = torch.zeros(len(tokens), device=tokens.device)
        for factor in self.factors:
            reads = first_parameter(factor)
            if reads == "tokens":
                part = factor(tokens)
            else:
                part = each_once(factor, [text[start:] for text in texts] if reads == "continuations" else texts)
            log_phi = log_phi + part.to(tokens.device)
        return log_phi


def base_potential(log_phi: Callable[[Tensor], Tensor]) -> LogPotential:
    """phi as the samplers take it at generation 0, where p^(0) is the model that is sampled."""
    return lambda tokens, log_p: log_phi(tokens)


def effective_potential(log_phi: Callable[[Tensor], Tensor], base: LanguageModel) -> LogPotential:
    """phi^(m): one teacher-forced pass of the base model over the sequences, whatever p^(m) gave them log_p [N]."""

    return lambda tokens, log_p: sequence_log_probs(base, tokens) + log_phi(tokens) - log_p
