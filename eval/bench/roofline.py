"""What the hardware allows: the matrix products and the memory traffic of a piece of work, and this machine's rates.

    limit = max(floating-point operations / measured rate, bytes that must move / measured bandwidth)

Only work that cannot be saved is counted: a prompt once, the first token's logits once, no padding, weights read once for each
step. Behind the first token every row is counted as if its text were its own; where rows share theirs, which depends on the
draws, the sampler computes fewer, and may stay under its limit.
The rate is that of a large square product, by the faster of PyTorch's matrix libraries. K rows, T steps, P prompt
tokens, D width, I inner width, L layers, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from eval.scorers.encoder import EncoderConfig
from tinystories.fast import onednn, suits_onednn
from tinystories.gpt_neo import GPTNeo, GPTNeoConfig
from twist import TwistMLP

SIDE = 2048  # of the square matrices that the rate is measured with
COPIED = 2**27  # bytes of the copy that the bandwidth is measured with


@dataclass(frozen=True)
class Work:
    """Floating-point operations of matrix products, and bytes read or written."""

    flops: float
    bytes: float = 0.0

    def limit(self, rates: "Work") -> float:
        """Seconds that the work takes at least at given rates, per second."""
        return max(self.flops / rates.flops, self.bytes / rates.bytes)


def transformer_flops(width: int, inner: int, layers: int, rows: int, queries: int, keys: float) -> float:
    """Products of `queries` positions in each of `rows` texts, each of which attends to `keys` others on average."""
    return 2.0 * rows * queries * layers * (4 * width**2 + 2 * width * inner + 2 * width * keys)


def gpt_neo_flops(config: GPTNeoConfig, rows: int, prompt: int, length: int) -> float:
    """One pass over the prompt, and `length` - 1 tokens of every row behind it; `length` logits of each row."""
    sizes = config.hidden_size, config.intermediate_size, config.num_layers
    rest = transformer_flops(*sizes, rows, length - 1, prompt + length / 2)
    head = 2.0 * (rows * (length - 1) + 1) * config.hidden_size * config.vocab_size
    return transformer_flops(*sizes, 1, prompt, prompt / 2) + rest + head


def sampling_work(model: GPTNeo, twist: TwistMLP | None, rows: int, prompt: int, length: int) -> Work:
    """Drawing `rows` continuations of `length` tokens, with or without a twist."""
    config, networks = model.config, [model] if twist is None else [model, twist]
    flops = gpt_neo_flops(config, rows, prompt, length)
    if twist is not None:
        matrices = sum(layer.weight.numel() for layer in (twist.first, twist.second, twist.last))
        flops += 2.0 * (rows * (length - 1) + 1) * matrices
    weights = sum(p.numel() * p.element_size() for network in networks for p in network.parameters())
    cache = 2 * 4 * rows * config.num_layers * config.hidden_size * (prompt + length / 2)  # float32, read once a step
    logits = 2 * 4 * rows * config.vocab_size * len(networks)  # float32, written and read once a step
    return Work(flops, length * (weights + cache + logits))


def distillation_work(model: GPTNeo, rows: int, prompt: int, length: int) -> Work:
    """One gradient step on `rows` continuations: backward costs two forwards."""
    return Work(3 * gpt_neo_flops(model.config, rows, prompt, length))


def encoder_work(config: EncoderConfig, lengths: list[int]) -> Work:
    """Reading texts of so many tokens each."""
    sizes = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    return Work(sum(transformer_flops(*sizes, 1, tokens, tokens) for tokens in lengths))


def probes(device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """What the rates are measured with: one product by each library, and one copy."""
    a, b = (torch.randn(SIDE, SIDE, device=device).to(dtype) for _ in range(2))
    source = torch.zeros(COPIED // 4, device=device)
    target = torch.empty_like(source)
    found = {"product": lambda: a @ b, "copy": lambda: target.copy_(source)}
    return found | ({"oneDNN product": lambda: onednn(a, b)} if suits_onednn(a, b) else {})


def rates_of(seconds: dict[str, float]) -> Work:
    """Operations and bytes per second from the times of `probes`; other entries are ignored."""
    product = min(seconds[name] for name in ("product", "oneDNN product") if name in seconds)
    return Work(2 * SIDE**3 / product, 2 * COPIED / seconds["copy"])
