"""GPT-Neo: p(s_t | s_{0:t-1}), the base language model (paper eq. 1).

    x_0 = wte[token] + wpe[position]                                  [B, T, D]
    x   = x + attention(LayerNorm(x)),  x = x + mlp(LayerNorm(x))     per layer
    mlp = linear, GELU in its tanh approximation, linear
    h   = LayerNorm(x_L)                                              [B, T, D]
    logits = h wte^T                                                  [B, T, V]

Unlike GPT-2's, attention scores are not divided by sqrt(head size), q, k and v have no bias, and
layers alternate between global attention and a local window of the last `window_size` positions,
the query's own included. Attention and logits are in float32 at least. Modules nest as tensors of a
checkpoint are named, and `config` has the entries of its config.json. B batch, T positions, S of
the whole history, D width, H heads, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinystories.decoder import Conditional, End, check_positions


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or in float64 where it is already that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def product(x: Tensor, y: Tensor) -> Tensor:
    """x y [B, H, T, .] of x [B, H, T, .] and y [B, H, ., .], or y [1, H, ., .] for all rows."""
    if len(y) == len(x):
        return x @ y
    rows = x.transpose(0, 1).flatten(1, 2)  # [H, B T, .]
    return (rows @ y[0]).unflatten(1, (len(x), x.shape[2])).transpose(0, 1)


class KeyValueCache:
    """Keys and values [B, H, S, D/H] of what has been read, in each layer in two parts: the prompt,
    which is read at batch 1 and shared by any number of rows, and the rest."""

    def __init__(self):
        self.layers: list[list[tuple[Tensor, ...]]] = []
        self.length = 0  # S, the positions read so far

    def parts(self, layer: int, keys: Tensor, values: Tensor) -> list[tuple[Tensor, ...]]:
        """Add new keys and values [B, H, T, D/H] of a layer; returns both parts of its history."""
        if layer == len(self.layers):
            self.layers.append([])
        parts = self.layers[layer]
        if len(parts) == 2:
            before = parts.pop()
            keys, values = torch.cat([before[0], keys], 2), torch.cat([before[1], values], 2)
        parts.append((keys, values))
        return parts

    def reorder_cache(self, parents: Tensor) -> None:
        """Row b continues the history of row parents[b]; parents [B], any number of rows."""
        for parts in self.layers:
            if len(parts) == 2:  # the first part, the prompt, serves every row
                parts[1] = tuple(part.index_select(0, parents) for part in parts[1])


class Attention(nn.Module):
    """Causal, unscaled multi-head attention over all positions or the last `window_size`."""

    def __init__(self, config: Any, layer: int):
        super().__init__()
        width = config.hidden_size
        kinds = [kind for some, count in config.attention_types for kind in some * count]
        is_local = kinds[layer] == "local"  # of [[["global", "local"], 2], ...]
        self.layer = layer
        self.num_heads = config.num_heads
        self.window = config.window_size if is_local else config.max_position_embeddings
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor, cache: KeyValueCache) -> Tensor:
        """[B, T, D] -> [B, T, D] of the new positions, behind what the cache holds."""
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        heads = [y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in projected]
        q, k, v = (at_least_float32(y) for y in heads)  # [B, H, T, D/H]
        parts = cache.parts(self.layer, k, v)
        scores = torch.cat([product(q, keys.mT) for keys, _ in parts], -1)  # [B, H, T, S]
        queries, seen = scores.shape[2:]
        if queries > 1 or seen > self.window:  # else a single query sees every key
            i = torch.arange(seen - queries, seen, device=x.device)[:, None]  # of the queries
            j = torch.arange(seen, device=x.device)  # of the keys
            scores.masked_fill_((j > i) | (j <= i - self.window), float("-inf"))
        sizes = [keys.shape[2] for keys, _ in parts]
        weights = scores.softmax(-1).split(sizes, -1)  # [B, H, T, S] in parts
        mixed = [product(part, parts[n][1]) for n, part in enumerate(weights)]
        mixed = sum(mixed[1:], mixed[0])  # [B, H, T, D/H]
        return self.out_proj(mixed.transpose(1, 2).flatten(-2).to(x.dtype))


class Block(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self, config: Any, layer: int):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.ln_1 = nn.LayerNorm(width, eps=config.layer_norm_epsilon)
        self.attn = nn.ModuleDict({"attention": Attention(config, layer)})
        self.ln_2 = nn.LayerNorm(width, eps=config.layer_norm_epsilon)
        self.mlp = nn.ModuleDict()
        self.mlp["c_fc"] = nn.Linear(width, inner)
        self.mlp["c_proj"] = nn.Linear(inner, width)

    def forward(self, x: Tensor, cache: KeyValueCache) -> Tensor:
        x = x + self.attn["attention"](self.ln_1(x), cache)  # [B, T, D]
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))


class Transformer(nn.Module):
    """All of the network but the output layer: the states h of tokens."""

    def __init__(self, config: Any):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)

    def forward(self, ids: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """h [B, T, D] of tokens [B, T] that follow `cache`."""
        cache = cache or KeyValueCache()
        positions = cache.length + torch.arange(ids.shape[1], device=ids.device)  # [T]
        cache.length += ids.shape[1]
        assert cache.length <= self.wpe.num_embeddings, "more tokens than the model has positions"
        x = self.wte(ids) + self.wpe(positions)  # [B, T, D]
        for block in self.h:
            x = block(x, cache)
        return self.ln_f(x)


class GPTNeo(nn.Module):
    """A causal language model; `model(ids [B, T])` gives logits [B, T, V]."""

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V], float32 or wider, of states [..., D]."""
        return at_least_float32(F.linear(hidden, self.transformer.wte.weight))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.transformer(ids))


class GPTNeoModel(Conditional):
    """p(s_{1:T} | s_0) of a GPT-Neo."""

    def __init__(
        self, network: GPTNeo, prompt: Tensor, length: int, end: End = (), vocab_size: int = 0
    ):
        """prompt [P], then T = length tokens below vocab_size, or any where that is 0."""
        config = network.config
        check_positions(prompt, length, config.max_position_embeddings)
        super().__init__(prompt, length, config.hidden_size, vocab_size or config.vocab_size, end)
        self.network = network

    def cache(self) -> KeyValueCache:
        return KeyValueCache()

    def read(self, ids: Tensor, cache: KeyValueCache) -> Tensor:
        return self.network.transformer(ids, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.network.head(hidden)[..., : self.vocab_size]
