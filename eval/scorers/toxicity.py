"""log p(toxic | s), the score under the potential log phi(s) = beta log p(toxic | s) (paper, section 3).

    h = encoder(s)_0                                    [B, D]   hidden state on the first token, <s>
    logit = w^T tanh(W h)                               [B]      POSITIVE means non-toxic
    log p(toxic | s) = log sigmoid(-logit)              [B]

The network is RoBERTa with one label. A token's position is pad_token_id + 1 plus the number of non-pad tokens before
it. log(1 - sigmoid(logit)) would be -inf in float32 from logit 17 on; log sigmoid(-logit) is exact everywhere.
"""

import reprlib
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from eval.scorers.encoder import Encoder, EncoderConfig, Runner, load_scorer, read_config, save_scorer
from tinystories.checkpoint import without_values
from tinystories.errors import InputError
from tinystories.layers import at_least_float32


class ClassificationHead(nn.Module):
    """Linear, tanh, linear to one logit."""

    def __init__(self, width: int):
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, 1)

    def forward(self, h: Tensor) -> Tensor:
        """[B, D] -> [B], float32 or wider: beta multiplies what rounding the logit would cost"""
        inner = at_least_float32(torch.tanh(self.dense(h)))  # [B, D]
        weight, bias = at_least_float32(self.out_proj.weight), at_least_float32(self.out_proj.bias)  # [1, D], [1]
        return F.linear(inner, weight, bias).squeeze(-1)


class ToxicityClassifier(nn.Module):
    """RoBERTa with one logit; positive means non-toxic."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.config = config
        self.roberta = Encoder(config)
        self.classifier = ClassificationHead(config.hidden_size)

    @property
    def pad_token_id(self) -> int:
        """The token that fills up rows, and one less than the first position."""
        return self.config.pad_token_id

    @property
    def max_tokens(self) -> int:
        """Tokens that the position table has room for."""
        return self.config.max_position_embeddings - self.config.pad_token_id - 1

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Logits [B] of tokens [B, T]; mask [B, T] is 0 on padding."""
        if ids.shape[1] > self.max_tokens:
            raise InputError(f"{ids.shape[1]} tokens exceed the classifier's {self.max_tokens}; shorten the text")
        text = (ids != self.pad_token_id).long()  # [B, T]
        positions = text.cumsum(1) * text + self.pad_token_id  # [B, T]
        return self.classifier(self.roberta.hidden(ids, mask, positions)[:, 0])


def load(path: str | Path, device: str | torch.device = "cpu") -> tuple[ToxicityClassifier, Tokenizer]:
    """Classifier (float32, eval mode) and tokenizer of a directory; InputError names the file that does not fit."""
    path = Path(path)
    config, raw = read_config(path, "roberta")
    labels = raw.get("id2label") or {"0": ""}
    if not isinstance(labels, dict) or len(labels) != 1:
        fault = f"id2label is {reprlib.repr(labels)} where one logit is needed"
        raise InputError(f"{path / 'config.json'}: {fault}; use another classifier")
    with without_values():
        model = ToxicityClassifier(config)
    tokenizer = load_scorer(path, model, "roberta.", "roberta.")
    return model.to(device).eval(), tokenizer


def save(path: str | Path, model: ToxicityClassifier, tokenizer: Tokenizer, dtype: torch.dtype = torch.float32) -> None:
    """Write the layout that `load` and transformers' AutoModelForSequenceClassification read, weights in `dtype`."""
    fields = {
        "architectures": ["RobertaForSequenceClassification"],
        "model_type": "roberta",
        "id2label": {"0": "NON_TOXIC"},
        "label2id": {"NON_TOXIC": 0},
    }
    for role, token in (("bos_token_id", "<s>"), ("eos_token_id", "</s>")):
        fields[role] = tokenizer.token_to_id(token)
    save_scorer(Path(path), model, tokenizer, dtype, fields)


class ToxicityScorer:
    """Texts to log p(toxic | s). A text's score does not depend on what is scored along with it."""

    def __init__(self, model: ToxicityClassifier, tokenizer: Tokenizer, batch_size: int = 64):
        self.run = Runner(model, tokenizer, batch_size)

    def logits(self, texts: list[str]) -> Tensor:
        """N texts -> logits [N], float32 on the CPU; InputError where one is not finite."""
        return self.run(texts)

    def __call__(self, texts: list[str]) -> Tensor:
        """N texts -> log p(toxic | s) [N]"""
        return F.logsigmoid(-self.logits(texts))

    def log_nontoxic(self, texts: list[str]) -> Tensor:
        """N texts -> log p(not toxic | s) [N]"""
        return F.logsigmoid(self.logits(texts))
