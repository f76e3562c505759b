"""log p(toxic | s), the score in the potential log phi(s) = beta log p(toxic | s) (paper, Sec. 3).

    h = encoder(s)_0                                    [B, D]   state on the first token, <s>
    logit = w^T tanh(W h)                               [B]      POSITIVE means non-toxic
    log p(toxic | s) = log sigmoid(-logit)              [B]      finite also where p rounds to 0

The network is RoBERTa with one label. Its table of positions begins with pad_token_id + 1 rows that
no token of a text has.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eval.scorers.encoder import Encoder, EncoderConfig, Runner, load_scorer
from tinystories.gpt_neo import at_least_float32


class ToxicityClassifier(nn.Module):
    """RoBERTa with one logit; positive means non-toxic."""

    model_type = "roberta"

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.config = config
        self.max_tokens = config.max_position_embeddings - config.pad_token_id - 1
        width = config.hidden_size
        self.roberta = Encoder(config)
        self.roberta.first_position = config.pad_token_id + 1
        self.classifier = nn.ModuleDict({"dense": nn.Linear(width, width)})
        self.classifier["out_proj"] = nn.Linear(width, 1)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Logits [B], float32 or wider, of tokens [B, T]; mask [B, T] is 0 on padding."""
        first = self.roberta.hidden(ids, mask)[:, 0]  # [B, D]
        inner = at_least_float32(torch.tanh(self.classifier["dense"](first)))  # [B, D]
        out = self.classifier["out_proj"]  # in float32, for beta multiplies what rounding costs
        return F.linear(inner, at_least_float32(out.weight), at_least_float32(out.bias)).squeeze(-1)


load = functools.partial(load_scorer, ToxicityClassifier)  # (path, device="cpu")


class ToxicityScorer(Runner):
    """N texts -> log p(toxic | s) [N]. A text's score does not depend on the other texts."""

    def logits(self, texts: tuple[str, ...]) -> Tensor:
        """Logits [N], float32 on the CPU."""
        return super().__call__(texts)

    def __call__(self, texts: list[str]) -> Tensor:
        """log p(toxic | s) [N]"""
        return F.logsigmoid(-self.logits(tuple(texts)))

    def log_nontoxic(self, texts: list[str]) -> Tensor:
        """log p(not toxic | s) [N]"""
        return F.logsigmoid(self.logits(tuple(texts)))
