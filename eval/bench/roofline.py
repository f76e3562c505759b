"""What the hardware allows: the products and the memory traffic of a piece of work, and the rates.

    limit = max(operations of products / measured rate, bytes that must move / measured bandwidth)

Only necessary work counts: the prompt once, no padding, the weights once for each step. Every row
counts, although rows with equal texts share one computation, so the sampler may be below its limit.
The rate is that of a large square product by the faster of PyTorch's libraries.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from eval.scorers.encoder import EncoderConfig
from tinystories.gpt_neo import GPTNeo
from tinystories.products import onednn, suits_onednn
from twist.mlp import TwistMLP

SIDE = 2048  # of the square matrices that the rate is measured with
COPIED = 2**27  # bytes of the copy that the bandwidth is measured with


@dataclass(frozen=True)
class Work:
    """Floating-point operations of matrix products, and bytes read or written; or such rates."""

    flops: float
    bytes: float = 0.0

    def limit(self, rates: "Work") -> float:
        """The least seconds that the work takes at rates per second."""
        return max(self.flops / rates.flops, self.bytes / rates.bytes)


def layer_flops(width: int, inner: int, positions: float, keys: float) -> float:
    """Products of a layer for `positions`, each of which attends to `keys` others on average."""
    return 2.0 * positions * (4 * width**2 + 2 * width * inner + 2 * width * keys)


def sampling_work(
    model: GPTNeo, twist: TwistMLP | None, rows: int, prompt: int, length: int
) -> Work:
    """Drawing `rows` continuations of `length` tokens after a prompt, with or without a twist."""
    config, steps = model.config, rows * (length - 1)  # the last token is never read
    width, inner, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    first = layer_flops(width, inner, prompt, prompt / 2)
    others = layer_flops(width, inner, steps, prompt + length / 2)
    head, weights = [model.output_weight], [*model.parameters()]
    if twist is not None:
        head += [twist.first.weight, twist.second.weight, twist.last.weight]
        weights += twist.parameters()
    head_flops = 2.0 * (steps + 1) * sum(weight.numel() for weight in head)  # the prompt's once
    cache = 2 * 4 * rows * config.num_layers * width * (prompt + length / 2)  # keys and values
    logits = 2 * 4 * rows * vocabulary * (1 if twist is None else 2)  # written and read
    step_bytes = sum(weight.nbytes for weight in weights) + cache + logits
    return Work(config.num_layers * (first + others) + head_flops, length * step_bytes)


def distillation_work(model: GPTNeo, rows: int, prompt: int, length: int) -> Work:
    """One gradient step on `rows` continuations; backward costs as much as two forward passes."""
    return Work(3 * sampling_work(model, None, rows, prompt, length).flops)


def encoder_work(config: EncoderConfig, lengths: list[int]) -> Work:
    """Reading texts of so many tokens each."""
    sizes = config.hidden_size, config.intermediate_size
    each = [layer_flops(*sizes, tokens, tokens) for tokens in lengths]
    return Work(config.num_hidden_layers * sum(each))


def probes(device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """What the rates are measured with: a product by each library, and a copy."""
    a, b = torch.randn(2, SIDE, SIDE, device=device).to(dtype)
    source = torch.zeros(COPIED // 4, device=device)
    target = torch.empty_like(source)
    found = {"product": lambda: a @ b, "copy": lambda: target.copy_(source)}
    return found | ({"oneDNN product": lambda: onednn(a, b)} if suits_onednn(a, b) else {})


def rates_of(seconds: dict[str, float]) -> Work:
    """Operations and bytes per second from the times of `probes`; other entries are ignored."""
    product = min(time for name, time in seconds.items() if name.endswith("product"))
    return Work(2 * SIDE**3 / product, 2 * COPIED / seconds["copy"])


def seconds_of(
    ways: dict[str, Callable[[], object]], repeats: int, device: torch.device
) -> dict[str, float]:
    """Median seconds of each way; they run in turns (A B A B), the first turn does not count."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, run in ways.items():
            began = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def linear_flops(x: list[int], weight: list[int], *_, out_shape: list[int], **__) -> int:
    """Operations of oneDNN's x W^T, from shapes."""
    return 2 * x[-1] * torch.Size(out_shape).numel()


def counter() -> FlopCounterMode:
    """Counts the operations of the products within its `with` block, oneDNN's among them."""
    products = {torch.ops.mkldnn._linear_pointwise: linear_flops}
    return FlopCounterMode(display=False, custom_mapping=products)
