"""How fast texts are drawn, beside `generate` of transformers and beside what the hardware allows.

    limit = operations of the matrix products / measured rate of a large square product

All run in turns (A B A B ...); medians count. transformers has neither twist nor resampling, but
the same weights. Rows with equal texts share one computation, so TSMC may stay below its limit.
"""

import statistics
import time
from functools import partial

import torch
from torch import nn

import tinystories
from eval.command import OneLineParser, one_line_errors
from eval.config import DTYPES, POCKET, RunOptions
from tinystories import Conditional, GPTNeo, GPTNeoConfig, InputError
from tinystories.load import config_to_json, names_on_disk
from tsmc import sample_proposal, tsmc
from twist.mlp import make_twist

LENGTH, PARTICLES, REPEATS, SIDE = 20, (50, 100, 1000), 5, 2048  # SIDE of the square matrices
PAPER = GPTNeoConfig(50257, 768, 4, 16, 2048, ("global", "local") * 2, 256, 3072)  # TinyStories-33M


def counterpart(model: GPTNeo) -> nn.Module:
    """The same language model in transformers."""
    try:
        import transformers
    except ImportError:
        raise InputError("needs transformers; pip install -r requirements-dev.txt") from None
    shape = config_to_json(model.config) | {"bos_token_id": None, "eos_token_id": None}
    twin = transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(**shape))
    twin.load_state_dict(names_on_disk(model.state_dict()), strict=False)  # its head is tied
    return twin.to(model.output_weight).eval()


def operations(model: GPTNeo, twist: nn.Module | None, rows: int, prompt: int) -> float:
    """Those of the products that draw `rows` texts of T tokens, the last of which is never read."""
    width, inner = model.config.hidden_size, model.config.intermediate_size
    steps = rows * (LENGTH - 1)
    layer = (prompt + steps) * (4 * width**2 + 2 * width * inner)
    layer += 2 * width * (prompt * prompt / 2 + steps * (prompt + LENGTH / 2))  # queries by keys
    heads = [model.output_weight, *(twist.parameters() if twist else [])]
    outputs = (steps + 1) * sum(weight.numel() for weight in heads if weight.ndim > 1)
    return 2 * (model.config.num_layers * layer + outputs)


def medians(ways: dict[str, partial]) -> dict[str, float]:
    """Seconds of each way; the first turn does not count."""
    seconds = {name: [] for name in ways}
    for _ in range(REPEATS + 1):
        for name, run in ways.items():
            began = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def bench(size: str, dtype: torch.dtype, device: torch.device) -> None:
    """Print a line for each way of drawing and each K."""
    model, tokenizer = tinystories.load(POCKET / "lm")
    prompt = torch.tensor(tokenizer.encode(RunOptions().prompt).ids, device=device)
    if size == "paper":
        model = GPTNeo(PAPER)
        model.wte.weight.data *= 0.02  # else all rows draw the same words
    base = Conditional(model.to(device, dtype), prompt, LENGTH)
    source = torch.Generator(device).manual_seed(0)
    twist = make_twist("mlp", base, source).to(model.output_weight)
    nn.init.normal_(twist.last.weight, std=0.01)  # else psi = 1
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": LENGTH, "pad_token_id": 0}
    twin, square = counterpart(model), torch.randn(SIDE, SIDE).to(model.output_weight)
    print(f"{size:18}{'ours, s':>10}{'generate':>10}{'faster':>8}{'limit':>10}{'over it':>9}")
    for rows in PARTICLES:
        ways = {
            "sampling": partial(sample_proposal, base, None, rows, source),
            "TSMC": partial(tsmc, base, twist, lambda tokens, log_p: 0 * log_p, rows, source),
            "generate": partial(twin.generate, prompt.expand(rows, -1), **settings),
            "product": partial(torch.matmul, square, square),
        }
        seconds = medians(ways)
        for name, psi in (("sampling", None), ("TSMC", twist)):
            ours, theirs = seconds[name], seconds["generate"]
            limit = operations(model, psi, rows, len(prompt)) * seconds["product"] / (2 * SIDE**3)
            times = f"{ours:10.4f}{theirs:10.4f}{theirs / ours:8.2f}{limit:10.4f}"
            print(f"{f'{name}, K = {rows}':18}{times}{ours / limit:9.2f}")


if __name__ == "__main__":
    with one_line_errors("eval.bench"):
        parser = OneLineParser("eval.bench", description=__doc__.split("\n")[0])
        parser.add_argument("--size", choices=("pocket", "paper"), default="pocket")
        parser.add_argument("--dtype", choices=DTYPES, default="float32")
        parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
        args = parser.parse_args()
        bench(args.size, DTYPES[args.dtype], RunOptions(device=args.device).torch_device())
