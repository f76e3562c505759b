"""GPT-Neo: p(s_t | s_{0:t-1}), the base language model (paper eq. 1).

    x_0 = wte[token] + wpe[position]                             [B, T, D]
    x   = x + attention(LayerNorm(x));  x = x + mlp(LayerNorm(x))    per layer
    h   = LayerNorm(x_L)                                         [B, T, D]
    logits = h W^T,  W = wte unless the head is untied           [B, T, V]

Three things set GPT-Neo apart from GPT-2 and silently break parity when missed:
attention scores are not divided by sqrt(head size) and are computed in float32; q, k and v have no bias; layers
alternate between global attention and a local window that covers the last `window_size` keys, the query's own included.

B batch, T positions, D width, H heads, V vocabulary.
"""

import dataclasses

import torch
from torch import Tensor, nn

from tinystories.cache import Cache
from tinystories.errors import InputError
from tinystories.fast import Linear, at_least_float32, linear, linear_each, linear_gelu


@dataclasses.dataclass(frozen=True)
class GPTNeoConfig:
    """The fields of a Hugging Face `config.json` that shape the network."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    max_position_embeddings: int
    attention_layers: tuple[str, ...]
    window_size: int = 256
    intermediate_size: int = 0
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True

    @classmethod
    def from_dict(cls, raw: dict, source: str) -> "GPTNeoConfig":
        """Read `config.json`; raises InputError, naming `source`, where it is no GPT-Neo that this code computes."""
        try:
            layers = tuple(kind for kinds, count in raw["attention_types"] for _ in range(count) for kind in kinds)
            config = cls(
                vocab_size=int(raw["vocab_size"]),
                hidden_size=int(raw["hidden_size"]),
                num_layers=int(raw["num_layers"]),
                num_heads=int(raw["num_heads"]),
                max_position_embeddings=int(raw["max_position_embeddings"]),
                attention_layers=layers,
                window_size=int(raw.get("window_size", 256)),
                intermediate_size=int(raw.get("intermediate_size") or 4 * int(raw["hidden_size"])),
                layer_norm_epsilon=float(raw.get("layer_norm_epsilon", 1e-5)),
                tie_word_embeddings=bool(raw.get("tie_word_embeddings", True)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{source}: not a GPT-Neo configuration ({error!r}); use a GPT-Neo checkpoint") from error
        config.check(raw, source)
        return config

    def check(self, raw: dict, source: str) -> None:
        """Raise InputError for a combination that no network has."""
        if raw.get("model_type", "gpt_neo") != "gpt_neo":
            raise InputError(f"{source}: model_type is {raw['model_type']!r}; use a GPT-Neo checkpoint")
        if raw.get("activation_function", "gelu_new") != "gelu_new":
            raise InputError(f"{source}: activation_function {raw['activation_function']!r} is unknown; use gelu_new")
        if len(self.attention_layers) != self.num_layers or set(self.attention_layers) - {"global", "local"}:
            raise InputError(
                f"{source}: attention_types must name num_layers = {self.num_layers} global or local layers"
            )
        sizes = (self.vocab_size, self.hidden_size, self.num_layers, self.num_heads, self.max_position_embeddings)
        if min(*sizes, self.window_size) < 1 or self.hidden_size % self.num_heads:
            raise InputError(f"{source}: sizes must be positive and hidden_size a multiple of num_heads")

    def to_dict(self) -> dict:
        """The same fields in the Hugging Face layout, so that `transformers` reads what we save."""
        fields = dataclasses.asdict(self)
        del fields["attention_layers"]
        return {
            "architectures": ["GPTNeoForCausalLM"],
            "model_type": "gpt_neo",
            "activation_function": "gelu_new",
            "attention_types": [[[kind], 1] for kind in self.attention_layers],
            "attention_dropout": 0.0,
            "embed_dropout": 0.0,
            "resid_dropout": 0.0,
            **fields,
        }


def product(x: Tensor, y: Tensor) -> Tensor:
    """x y [B, H, T, .] of x [B, H, T, .] and y [B, H, ., .] or [1, H, ., .], which goes over all rows at once."""
    if len(y) == len(x):
        return x @ y
    return (x.transpose(0, 1).flatten(1, 2) @ y[0]).unflatten(1, (len(x), x.shape[2])).transpose(0, 1)


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    """q k^T [B, H, T, S]. Rows with a query and keys of their own make for products so thin that plain sums are faster."""
    thin = q.shape[2] == 1 and len(k) == len(q)
    return (q * k).sum(-1)[:, :, None] if thin else product(q, k.mT)


def mixture_of(weights: Tensor, v: Tensor) -> Tensor:
    """weights v [B, H, T, D/H] of weights [B, H, T, S] and v [B, H, S, D/H]."""
    thin = weights.shape[2] == 1 and len(v) == len(weights)
    return (weights.mT * v).sum(2, keepdim=True) if thin else product(weights, v)


class Attention(nn.Module):
    """Multi-head self-attention, causal, unscaled, over all keys or over the last `window_size`."""

    def __init__(self, config: GPTNeoConfig, layer: int):
        super().__init__()
        width = config.hidden_size
        self.layer, self.num_heads = layer, config.num_heads
        self.window = config.window_size if config.attention_layers[layer] == "local" else None
        self.q_proj = Linear(width, width, bias=False)
        self.k_proj = Linear(width, width, bias=False)
        self.v_proj = Linear(width, width, bias=False)
        self.out_proj = Linear(width, width)

    def hidden_keys(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """True where query i may not see key j [queries, keys]; None where a single query sees every key."""
        if queries == 1 and (self.window is None or keys <= self.window):
            return None
        i = torch.arange(keys - queries, keys, device=device)[:, None]
        j = torch.arange(keys, device=device)[None, :]
        return (j > i) if self.window is None else (j > i) | (j <= i - self.window)

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        """[B, T, D] -> [B, T, D]; with a cache, x holds only the new positions."""
        q, k, v = (
            projected.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projected in linear_each(x, (self.q_proj, self.k_proj, self.v_proj))
        )  # [B, H, T, D/H]
        q = at_least_float32(q)
        parts = [(at_least_float32(k), at_least_float32(v))] if cache is None else cache.append(self.layer, k, v)
        scores = torch.cat([scores_of(q, keys) for keys, _ in parts], -1)  # [B, H, T, S]
        hidden = self.hidden_keys(q.shape[2], scores.shape[3], x.device)
        if hidden is not None:
            scores.masked_fill_(hidden, float("-inf"))
        weights = scores.softmax(-1).split([keys.shape[2] for keys, _ in parts], -1)
        mixed = sum(mixture_of(w, values) for w, (_, values) in zip(weights, parts, strict=True))  # [B, H, T, D/H]
        return self.out_proj(mixed.transpose(1, 2).flatten(-2).to(x.dtype))  # [B, T, D]


class MLP(nn.Module):
    """Linear, GELU in its tanh approximation, linear."""

    def __init__(self, config: GPTNeoConfig):
        super().__init__()
        self.c_fc = Linear(config.hidden_size, config.intermediate_size)
        self.c_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]"""
        return self.c_proj(linear_gelu(x, self.c_fc, "tanh"))


class Block(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self, config: GPTNeoConfig, layer: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.attn = Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        """[B, T, D] -> [B, T, D]"""
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.mlp(self.ln_2(x))


class GPTNeo(nn.Module):
    """A causal language model; `model(ids [B, T])` gives logits [B, T, V]."""

    def __init__(self, config: GPTNeoConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

    def hidden(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        """Hidden states after the last LayerNorm [B, T, D] of tokens [B, T], which continue what `cache` holds.

        Raises InputError where the text is longer than the position table.
        """
        start = 0 if cache is None else cache.length
        end = start + ids.shape[1]
        if end > self.config.max_position_embeddings:
            raise InputError(
                f"{end} tokens exceed this model's {self.config.max_position_embeddings} positions; shorten"
            )
        x = self.wte(ids) + self.wpe(torch.arange(start, end, device=ids.device))  # [B, T, D]
        for block in self.h:
            x = block(x, cache)
        if cache is not None:
            cache.length = end
        return self.ln_f(x)

    def head(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V], float32 or wider, of hidden states [..., D]."""
        weight = self.wte.weight if self.config.tie_word_embeddings else self.lm_head.weight
        return at_least_float32(linear(hidden, weight))

    def forward(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        """[B, T] -> [B, T, V]"""
        return self.head(self.hidden(ids, cache))
