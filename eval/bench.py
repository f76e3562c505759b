"""How fast texts are drawn, beside `generate` of transformers and beside a plain forward pass.

    one pass    log p of the finished texts, and with a twist log psi: the same matrix products, all
                steps at once. Token by token it is hard to be faster.

transformers has neither twist nor resampling, but the same weights. Rows with equal texts share one
computation, so TSMC can take less than one pass.
"""

from functools import partial

import torch
from torch import nn
from torch.utils.benchmark import Timer
from transformers import GPTNeoForCausalLM

import tinystories
from eval.command import OneLineParser, one_line_errors
from eval.config import POCKET, RunOptions
from tinystories import Conditional
from tsmc import proposal_log_probs, sample_proposal, tsmc
from twist.mlp import make_twist

LENGTH, PARTICLES = 20, (50, 100, 1000)
LEAST_SECONDS = 3  # of drawing in each way


def bench(device: torch.device) -> None:
    """Print a line for each K: the median seconds of each way, on one thread."""
    network, tokenizer = tinystories.load(POCKET / "lm", device)
    prompt = torch.tensor(tokenizer.encode(RunOptions().prompt).ids, device=device)
    model = Conditional(network, prompt, LENGTH)
    source = torch.Generator(device).manual_seed(0)
    twist = make_twist("mlp", model, source)
    nn.init.normal_(twist.last.weight, std=0.01, generator=source)  # else psi = 1
    theirs = GPTNeoForCausalLM.from_pretrained(POCKET / "lm", dtype=torch.float32).to(device)
    theirs.generation_config.update(do_sample=True, top_k=0, pad_token_id=0)
    for rows in PARTICLES:
        texts = sample_proposal(model, None, rows, source).tokens
        ways = {
            "sampling": partial(sample_proposal, model, None, rows, source),
            "one pass": partial(proposal_log_probs, model, None, texts),
            "generate": partial(theirs.generate, prompt.expand(rows, -1), max_new_tokens=LENGTH),
            "TSMC": partial(tsmc, model, twist, lambda tokens, log_p: 0 * log_p, rows, source),
            "one pass with psi": partial(proposal_log_probs, model, twist, texts),
        }
        print(f"K = {rows}, seconds:", end="")
        for name, run in ways.items():
            timer = Timer("run()", globals={"run": run})
            seconds = timer.blocked_autorange(min_run_time=LEAST_SECONDS).median
            print(f"   {name} {seconds:.3f}", end="", flush=True)
        print()


if __name__ == "__main__":
    with one_line_errors("eval.bench"):
        parser = OneLineParser("eval.bench", description=__doc__.split("\n")[0])
        parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
        bench(RunOptions(device=parser.parse_args().device).torch_device())
