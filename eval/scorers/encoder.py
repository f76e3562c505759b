"""The transformer encoder that BERT and RoBERTa share, and running it over many texts.

    x = LayerNorm(word[token] + position[place] + type[0])                            [B, T, D]
    x = LayerNorm(x + attention(x)),  x = LayerNorm(x + W_2 gelu(W_1 x))              per layer
    attention = softmax(q k^T / sqrt(D/H) + bias) v,  bias = 0 on text, lowest number on padding

gelu is the exact one (erf). The modules nest as the tensors of a Hugging Face checkpoint are named.
B batch, T tokens, D width, H heads.
"""

import dataclasses
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from tinystories.load import config_from_json, load_network, save_network

BATCH = 64  # texts at most
MAX_TOKENS = 2**13  # of a batch: the widest activations of RoBERTa-base then take 100 MB


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """The fields of a Hugging Face `config.json` that shape the network."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int
    pad_token_id: int
    layer_norm_eps: float = 1e-12


class SelfAttention(nn.Module):
    """Multi-head attention of all tokens to all tokens that are no padding."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """[B, T, D], bias added to the scores [B, 1, 1, T] -> [B, T, D]"""
        heads = (self.num_heads, -1)
        projected = (self.query(x), self.key(x), self.value(x))
        q, k, v = (y.unflatten(-1, heads).transpose(1, 2) for y in projected)  # [B, H, T, D/H]
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + bias  # [B, H, T, T]
        mixed = scores.softmax(-1).to(v.dtype) @ v  # [B, H, T, D/H]
        return mixed.transpose(1, 2).flatten(-2)  # [B, T, D]


class Residual(nn.Module):
    """LayerNorm(x + W y): how attention and the feed-forward network are added."""

    def __init__(self, inner: int, config: EncoderConfig):
        super().__init__()
        self.dense = nn.Linear(inner, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x [B, T, D], y [B, T, inner] -> [B, T, D]"""
        return self.LayerNorm(x + self.dense(y))


class Layer(nn.Module):
    """Post-norm transformer layer."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        width = config.hidden_size
        attention = {"self": SelfAttention(config), "output": Residual(width, config)}
        self.attention = nn.ModuleDict(attention)
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, config.intermediate_size)})
        self.output = Residual(config.intermediate_size, config)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]"""
        x = self.attention["output"](x, self.attention["self"](x, bias))
        return self.output(x, F.gelu(self.intermediate["dense"](x)))


class Encoder(nn.Module):
    """Hidden states of texts."""

    first_position = 0  # of a text's tokens in the table of positions

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.embeddings = nn.ModuleDict()
        self.embeddings["word_embeddings"] = nn.Embedding(config.vocab_size, width)
        self.embeddings["position_embeddings"] = nn.Embedding(config.max_position_embeddings, width)
        self.embeddings["token_type_embeddings"] = nn.Embedding(config.type_vocab_size, width)
        self.embeddings["LayerNorm"] = nn.LayerNorm(width, eps=config.layer_norm_eps)
        layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.encoder = nn.ModuleDict({"layer": layers})

    def hidden(self, ids: Tensor, mask: Tensor) -> Tensor:
        """States [B, T, D] of tokens [B, T]; mask [B, T] is 0 on padding, which stands behind."""
        embeddings = self.embeddings
        positions = torch.arange(ids.shape[1], device=ids.device) + self.first_position  # [T]
        x = embeddings["word_embeddings"](ids) + embeddings["token_type_embeddings"].weight[0]
        x = embeddings["LayerNorm"](x + embeddings["position_embeddings"](positions))  # [B, T, D]
        bias = torch.where(mask == 0, torch.finfo(torch.float32).min, 0.0)  # [B, T]
        for layer in self.encoder["layer"]:
            x = layer(x, bias[:, None, None, :])
        return x


class Runner:
    """A network, of ids and mask [B, T], run over texts in batches that are sorted by length.

    No result depends on the other texts.
    """

    def __init__(self, model: nn.Module, tokenizer: Tokenizer):
        self.model = model
        self.tokenizer = tokenizer
        self.tokenizer.enable_truncation(model.max_tokens)  # special tokens included

    def __call__(self, texts: list[str]) -> Tensor:
        """Results [N, ...] on the CPU in the order of the texts."""
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts))]
        order = torch.tensor([len(row) for row in rows], dtype=torch.long).argsort(stable=True)
        size = max(1, min(BATCH, MAX_TOKENS // max(map(len, rows), default=1)))
        results = []
        with torch.inference_mode():
            for batch in order.split(size):  # no texts are one empty batch, whose shape is right
                results.append(self.model(*self.pad([rows[i] for i in batch])).cpu())
        return torch.cat(results)[order.argsort()]

    def pad(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Tokens [B, T] padded to the longest row and the mask [B, T], on the model's device."""
        device = next(self.model.parameters()).device
        width = max(map(len, rows), default=1)
        pad = self.model.config.pad_token_id
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows], dtype=torch.long)
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.long)  # [B]
        mask = (torch.arange(width) < lengths[:, None]).long()  # [B, T]
        return ids.view(mask.shape).to(device), mask.to(device)


def load_scorer(
    kind: type, path: str | Path, device: str | torch.device = "cpu"
) -> tuple[nn.Module, Tokenizer]:
    """Network of a class (float32, eval mode) and tokenizer; InputError names what does not fit."""
    fixed = {"model_type": kind.model_type, "hidden_act": "gelu"}

    def from_json(raw: dict) -> nn.Module:
        return kind(config_from_json(EncoderConfig, raw, fixed))

    return load_network(path, kind.model_type, from_json, device)


def save(
    path: Path, model: nn.Module, tokenizer: Tokenizer, dtype: torch.dtype = torch.float32
) -> None:
    """Write what `load_scorer` and transformers read, with weights in `dtype`."""
    tensors = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    config = {"model_type": model.model_type, "num_labels": 1, "hidden_act": "gelu"}
    config |= dataclasses.asdict(model.config)
    pad = tokenizer.id_to_token(model.config.pad_token_id)
    save_network(path, config, tensors, tokenizer, pad_token=pad)
