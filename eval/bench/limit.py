"""What the hardware allows: the matrix products of a piece of work, and the rate of products.

    limit = operations of products / measured rate

Only necessary work counts: the prompt once, no padding, and no memory traffic. Every row counts,
although rows with equal texts share one computation, so TSMC may be below its limit. The rate is
that of a large square product by the faster of PyTorch's libraries.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from eval.scorers.encoder import EncoderConfig
from tinystories.gpt_neo import GPTNeo
from twist.mlp import TwistMLP

SIDE = 2048  # of the square matrices that the rate is measured with
Way = Callable[[], object]


def layer_flops(width: int, inner: int, positions: float, keys: float) -> float:
    """Products of a layer for `positions`, each of which attends to `keys` others on average."""
    return 2.0 * positions * (4 * width**2 + 2 * width * inner + 2 * width * keys)


def sampling_flops(
    model: GPTNeo, twist: TwistMLP | None, rows: int, prompt: int, length: int
) -> float:
    """Drawing `rows` continuations of `length` tokens after a prompt, with or without a twist."""
    config, steps = model.config, rows * (length - 1)  # the last token is never read
    sizes = (config.hidden_size, config.intermediate_size)
    first = layer_flops(*sizes, prompt, prompt / 2)
    others = layer_flops(*sizes, steps, prompt + length / 2)
    heads = [model.output_weight]
    if twist is not None:
        heads += [twist.first.weight, twist.second.weight, twist.last.weight]
    head_flops = 2.0 * (steps + 1) * sum(weight.numel() for weight in heads)  # the prompt's once
    return config.num_layers * (first + others) + head_flops


def encoder_flops(config: EncoderConfig, lengths: list[int]) -> float:
    """Reading texts of so many tokens each."""
    sizes = (config.hidden_size, config.intermediate_size)
    return config.num_hidden_layers * sum(layer_flops(*sizes, each, each) for each in lengths)


def measure(ways: dict[str, Way], repeats: int, like: Tensor) -> tuple[dict[str, float], float]:
    """Median seconds of each way, all in turns, and operations per second of `like`'s products."""
    a, b = torch.randn(2, SIDE, SIDE, device=like.device).to(like.dtype)
    products: dict[str, Way] = {"product": lambda: a @ b}
    times: dict[str, list[float]] = {name: [] for name in ways | products}
    for _ in range(repeats + 1):
        for name, run in (ways | products).items():
            began = time.perf_counter()
            run()
            if like.is_cuda:
                torch.cuda.synchronize(like.device)
            times[name].append(time.perf_counter() - began)
    seconds = {name: statistics.median(values[1:]) for name, values in times.items()}
    return seconds, 2 * SIDE**3 / min(seconds[name] for name in products)
