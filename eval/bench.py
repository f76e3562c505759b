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
from transformers import GPTNeoForCausalLM

import tinystories
from eval.command import OneLineParser, one_line_errors
from eval.config import POCKET, RunOptions
from tinystories import Conditional
from tsmc import sample_proposal, tsmc
from twist.mlp import make_twist

LENGTH, PARTICLES, REPEATS, SIDE = 20, (50, 100, 1000), 5, 2048  # SIDE of the square matrices


def operations(model: Conditional, twist: nn.Module | None, rows: int) -> float:
    """Those of the products that draw `rows` texts of T tokens, the last of which is never read."""
    config, prompt = model.network.config, len(model.prompt)
    width, inner = config.hidden_size, config.intermediate_size
    steps = rows * (model.length - 1)
    layer = (prompt + steps) * (4 * width**2 + 2 * width * inner)
    layer += 2 * width * (prompt * prompt / 2 + steps * (prompt + model.length / 2))  # q k^T, w v
    heads = [model.output_embeddings, *(twist.parameters() if twist else [])]
    outputs = (steps + 1) * sum(weight.numel() for weight in heads if weight.ndim > 1)
    return 2 * (config.num_layers * layer + outputs)


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


def bench(device: torch.device) -> None:
    """Print a line for each way of drawing and each K."""
    network, tokenizer = tinystories.load(POCKET / "lm", device)
    prompt = torch.tensor(tokenizer.encode(RunOptions().prompt).ids, device=device)
    model = Conditional(network, prompt, LENGTH)
    source = torch.Generator(device).manual_seed(0)
    twist = make_twist("mlp", model, source)
    nn.init.normal_(twist.last.weight, std=0.01)  # else psi = 1
    theirs = GPTNeoForCausalLM.from_pretrained(POCKET / "lm", dtype=torch.float32).to(device)
    theirs.generation_config.update(do_sample=True, top_k=0, pad_token_id=0)
    square = torch.randn(SIDE, SIDE, device=device)
    print(f"{'':18}{'ours, s':>10}{'generate':>10}{'faster':>8}{'limit':>10}{'over it':>9}")
    for rows in PARTICLES:
        inputs = prompt.expand(rows, -1)
        ways = {
            "sampling": partial(sample_proposal, model, None, rows, source),
            "TSMC": partial(tsmc, model, twist, lambda tokens, log_p: 0 * log_p, rows, source),
            "generate": partial(theirs.generate, inputs, max_new_tokens=LENGTH),
            "product": partial(torch.matmul, square, square),
        }
        seconds = medians(ways)
        for name, psi in (("sampling", None), ("TSMC", twist)):
            limit = operations(model, psi, rows) * seconds["product"] / (2 * SIDE**3)
            times = f"{seconds[name]:10.4f}{seconds['generate']:10.4f}"
            faster, over = seconds["generate"] / seconds[name], seconds[name] / limit
            print(f"{f'{name}, K = {rows}':18}{times}{faster:8.2f}{limit:10.4f}{over:9.2f}")


if __name__ == "__main__":
    with one_line_errors("eval.bench"):
        parser = OneLineParser("eval.bench", description=__doc__.split("\n")[0])
        parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
        bench(RunOptions(device=parser.parse_args().device).torch_device())
