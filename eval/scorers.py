"""The networks of the paper that score texts.

    toxicity      h = encoder(s)_0,  logit = w^T tanh(W h)         [B]      RoBERTa (section 3)
                  log p(toxic | s) = log sigmoid(-logit)           [B]      positive: non-toxic
    similarity    e = sum_t m_t h_t / sum_t m_t,  e <- e / |e|     [B, D]   BERT; m is 0 on padding

h_0 is the state of the first token, <s>. Both networks are the transformer encoder

    x = LayerNorm(word[token] + position[place] + type[0])                            [B, T, D]
    x = LayerNorm(x + attention(x)),  x = LayerNorm(x + W_2 gelu(W_1 x))              per layer
    attention = softmax(q k^T / sqrt(D/H) + bias) v,  bias = 0 on text, lowest number on padding

gelu is the exact one (erf). Modules nest as the tensors of a Hugging Face checkpoint are named, and
`config` has the entries of its config.json. B batch, T tokens, D width, H heads, N texts.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from tinystories.gpt_neo import at_least_float32
from tinystories.load import checkpoint_directory, load_network, read_json
from tsmc.streams import side_by_side

BATCH = 50  # texts at most, half of a batch of CTL
MAX_TOKENS = 2**13  # of a batch: the widest activations of RoBERTa-base then take 100 MB


def residual(inner: int, config: SimpleNamespace) -> nn.ModuleDict:
    """The parts of LayerNorm(x + W y), y [.., inner]."""
    norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
    return nn.ModuleDict({"dense": nn.Linear(inner, config.hidden_size), "LayerNorm": norm})


class Layer(nn.Module):
    """Post-norm transformer layer: attention of all tokens to all that are no padding, then MLP."""

    def __init__(self, config: SimpleNamespace):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.num_heads = config.num_attention_heads
        heads = nn.ModuleDict({name: nn.Linear(width, width) for name in ("query", "key", "value")})
        self.attention = nn.ModuleDict({"self": heads, "output": residual(width, config)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, inner)})
        self.output = residual(inner, config)

    def forward(self, x: Tensor, bias: Tensor, wanted: int | None = None) -> Tensor:
        """States [B, Q, D] of the first Q = wanted tokens of x [B, T, D]; bias [B, 1, 1, T]."""
        first = x[:, :wanted]  # [B, Q, D]
        q, k, v = (
            projection(y).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, H, ., D/H]
            for projection, y in zip(self.attention["self"].values(), (first, x, x), strict=True)
        )
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + bias  # [B, H, Q, T]
        mixed = (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(-2)  # [B, Q, D]
        add = self.attention["output"]
        x = add["LayerNorm"](first + add["dense"](mixed))
        hidden = F.gelu(self.intermediate["dense"](x))
        return self.output["LayerNorm"](x + self.output["dense"](hidden))


class Encoder(nn.Module):
    """Hidden states of texts; the first token of a text has position `first`."""

    def __init__(self, config: SimpleNamespace, first: int = 0):
        super().__init__()
        self.config = config
        self.first = first
        width = config.hidden_size
        self.embeddings = nn.ModuleDict()
        self.embeddings["word_embeddings"] = nn.Embedding(config.vocab_size, width)
        self.embeddings["position_embeddings"] = nn.Embedding(config.max_position_embeddings, width)
        self.embeddings["token_type_embeddings"] = nn.Embedding(config.type_vocab_size, width)
        self.embeddings["LayerNorm"] = nn.LayerNorm(width, eps=config.layer_norm_eps)
        layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.encoder = nn.ModuleDict({"layer": layers})

    def hidden(self, ids: Tensor, mask: Tensor, wanted: int | None = None) -> Tensor:
        """States [B, Q, D] of the first Q = wanted tokens [B, T]; mask [B, T] is 0 on padding."""
        table = self.embeddings
        positions = torch.arange(ids.shape[1], device=ids.device) + self.first  # [T]
        x = table["word_embeddings"](ids) + table["token_type_embeddings"].weight[0]
        x = table["LayerNorm"](x + table["position_embeddings"](positions))  # [B, T, D]
        bias = torch.where(mask == 0, torch.finfo(torch.float32).min, 0.0)  # [B, T]
        *layers, last = self.encoder["layer"]
        for layer in layers:
            x = layer(x, bias[:, None, None, :])
        return last(x, bias[:, None, None, :], wanted)


class SentenceEncoder(Encoder):
    """BERT with mean pooling, as all-MiniLM-L6-v2, which cuts texts at 256 tokens."""

    model_type = "bert"

    def __init__(self, config: SimpleNamespace):
        super().__init__(config)
        self.max_tokens = min(256, config.max_position_embeddings)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Unit vectors [B, D] of tokens [B, T]; mask [B, T] is 0 on padding."""
        hidden = at_least_float32(self.hidden(ids, mask))  # [B, T, D]
        weights = mask[..., None].to(hidden.dtype)  # [B, T, 1]
        return F.normalize(((hidden * weights).sum(1) / weights.sum(1)).float(), dim=-1)


class ToxicityClassifier(nn.Module):
    """RoBERTa with one logit; positive means non-toxic."""

    model_type = "roberta"

    def __init__(self, config: SimpleNamespace):
        super().__init__()
        self.config = config
        first = config.pad_token_id + 1  # rows of the table that no token of a text has
        self.max_tokens = config.max_position_embeddings - first
        self.roberta = Encoder(config, first)
        dense = nn.Linear(config.hidden_size, config.hidden_size)
        out = nn.Linear(config.hidden_size, 1)
        self.classifier = nn.ModuleDict({"dense": dense, "out_proj": out})

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Logits [B], float32 or wider, of tokens [B, T]; mask [B, T] is 0 on padding."""
        first = self.roberta.hidden(ids, mask, 1)[:, 0]  # [B, D]; the last layer needs no others
        inner = at_least_float32(torch.tanh(self.classifier["dense"](first)))  # [B, D]
        out = self.classifier["out_proj"]  # in float32, for beta multiplies what rounding costs
        return F.linear(inner, at_least_float32(out.weight), at_least_float32(out.bias)).squeeze(-1)


def load_scorer(kind: type, name: str, device: str | torch.device) -> tuple[Any, Tokenizer]:
    """Network of a class (float32, eval mode) and tokenizer; ValueError for one of another kind."""
    directory = checkpoint_directory(name)
    raw = {"layer_norm_eps": 1e-12} | read_json(directory / "config.json")
    if (raw["model_type"], raw["hidden_act"]) != (kind.model_type, "gelu"):
        raise ValueError(f"{name}: is a {raw['model_type']}, not a {kind.model_type} with gelu")
    return load_network(directory, kind(SimpleNamespace(**raw)), device)


class Runner:
    """A network, of ids and mask [B, T], run over texts in batches that are sorted by length."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer):
        self.model = model
        self.last: tuple[list[str], Tensor] = ([], torch.empty(0))
        self.tokenizer = tokenizer
        self.tokenizer.enable_truncation(model.max_tokens)  # special tokens included

    def __call__(self, texts: list[str]) -> Tensor:
        """Results [N, ...] on the CPU in the order of the texts."""
        if texts == self.last[0]:  # potential and table score the same texts one after the other
            return self.last[1]
        device = next(self.model.parameters()).device
        pad = self.model.config.pad_token_id
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts))]
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.long)  # [N]
        order = lengths.argsort(stable=True)
        size = max(1, min(BATCH, MAX_TOKENS // max(map(len, rows), default=1)))
        batches = []
        for batch in order.split(size):  # no texts are one empty batch, whose shape is right
            width = max([len(rows[n]) for n in batch], default=1)
            padded = [rows[n] + [pad] * (width - len(rows[n])) for n in batch]
            ids = torch.tensor(padded, dtype=torch.long).view(-1, width)  # [B, T]
            mask = (torch.arange(width) < lengths[batch, None]).long()  # [B, T]
            batches.append((ids.to(device), mask.to(device)))
        score = torch.inference_mode()(lambda batch: self.model(*batch))
        results = list(side_by_side(score, batches, device))
        self.last = texts, torch.cat(results).cpu()[order.argsort()]
        return self.last[1]
