"""The potential and the effective potential.

    log phi(s_{1:T})     = beta * log p(toxic | s)                                             (paper, Sec. 3, "Setup")
    log phi^(m)(s_{1:T}) = log p^(0)(s_{1:T}) + log phi(s_{1:T}) - log p^(m)(s_{1:T})            (paper, Sec. 2, Phase 2)

The second keeps the target sigma, proportional to p^(0) phi, the same for every generation: p^(m) phi^(m) = p^(0) phi.
The scorer reads the text, prompt included; it is any callable from texts to log scores, so this file knows no classifier.
N sequences, T tokens.
"""

from collections.abc import Callable, Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tsmc.proposal import LanguageModel, sequence_log_probs
from tsmc.sampler import LogPotential

LogScorer = Callable[[Sequence[str]], Tensor]
"""texts (N of them) -> log p(toxic | text) [N], at most 0."""


class TextPotential:
    """log phi of continuation tokens: decode, score each distinct text once, multiply by beta."""

    def __init__(self, log_scorer: LogScorer, tokenizer: Tokenizer, prompt: Tensor, beta: float):
        self.log_scorer, self.tokenizer, self.beta = log_scorer, tokenizer, beta
        self.prompt = prompt.tolist()

    def texts(self, tokens: Tensor) -> list[str]:
        """The texts, prompt included, of continuations tokens [N, T]; end-of-text leaves no trace in them."""
        return self.tokenizer.decode_batch([self.prompt + row for row in tokens.tolist()], skip_special_tokens=True)

    def log_score(self, tokens: Tensor) -> Tensor:
        """log p(toxic | s) [N] of tokens [N, T]; equal texts are scored once."""
        texts = self.texts(tokens)
        distinct = {text: index for index, text in enumerate(dict.fromkeys(texts))}
        scores = self.log_scorer(list(distinct)).to(tokens.device)
        return scores[torch.tensor([distinct[text] for text in texts], device=tokens.device)]

    def __call__(self, tokens: Tensor) -> Tensor:
        """log phi [N] of tokens [N, T]; at beta = 0 phi is 1 even where the score is 0."""
        return self.beta * self.log_score(tokens) if self.beta > 0 else torch.zeros(len(tokens), device=tokens.device)


def base_potential(log_phi: Callable[[Tensor], Tensor]) -> LogPotential:
    """phi as the samplers take it at generation 0, where p^(0) is the model that is sampled."""
    return lambda tokens, log_p: log_phi(tokens)


def effective_potential(log_phi: Callable[[Tensor], Tensor], base: LanguageModel) -> LogPotential:
    """phi^(m): one teacher-forced pass of the base model over the sequences, whatever p^(m) gave them log_p [N]."""

    return lambda tokens, log_p: sequence_log_probs(base, tokens) + log_phi(tokens) - log_p
