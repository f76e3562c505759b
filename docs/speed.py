"""How fast are the samplers? Seconds, and those of `generate` of transformers, side by side.

    pip install transformers
    OMP_NUM_THREADS=1 python docs/speed.py 100 1000        numbers K of texts, on one core

K texts of T = 20 tokens by the shipped GPT-Neo, and with --wide by a network of the shape of
TinyStories-33M with random weights. TSMC resamples at every step, with a new twist and phi = 1. A
number is the median of five, taken in turns, so that other work on the machine meets all of them
alike; quote their ratios.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from eval.options import POCKET
from tinystories.decoder import Conditional
from tinystories.load import load_model
from tsmc.proposal import proposal_log_probs, sample_proposal
from tsmc.sampler import tsmc
from tsmc.sigma import Sigma
from twist.mlp import TwistMLP

PROMPT, LENGTH, REPEATS = "Once upon a time, there was a", 20, 5
WIDE = {"vocab_size": 50257, "hidden_size": 768, "num_layers": 4, "num_heads": 16}
WIDE |= {"attention_types": [[["global", "local"], 2]], "max_position_embeddings": 2048}


def wide_network(folder: str) -> str:
    """A directory with a random network of the shape WIDE and the tokenizer of the shipped one."""
    torch.manual_seed(0)
    network = transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(**WIDE))
    network.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (Path(folder) / name).write_bytes((POCKET / "lm" / name).read_bytes())
    return folder


def seconds(model: Conditional, theirs: Any, rows: int) -> dict[str, float]:
    """Seconds for K = rows texts of a network, here and in transformers, by what is timed."""
    generator = torch.Generator().manual_seed(0)
    twist = TwistMLP(model.width, model.vocab_size, generator).requires_grad_(False)
    sigma = Sigma(model, model, lambda tokens: torch.zeros(len(tokens)))
    settings = {"do_sample": True, "top_k": 0, "pad_token_id": 0}
    settings |= {"min_new_tokens": LENGTH, "max_new_tokens": LENGTH}
    prompt = model.prompt.repeat(rows, 1)  # [K, P]
    tokens = sample_proposal(model, None, rows, generator).tokens  # [K, T]
    calls = {
        "sampling": lambda: sample_proposal(model, None, rows, generator),
        "one pass": lambda: proposal_log_probs(model, None, tokens),
        "TSMC": lambda: tsmc(sigma, twist, rows, generator),
        "generate": lambda: theirs.generate(prompt, **settings),
    }
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            with torch.no_grad():
                call()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(found[1:]) for name, found in taken.items()}  # warm


def main() -> None:
    """Print the table, a row for each K."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=int, nargs="+", metavar="K", help="numbers of texts")
    parser.add_argument("--wide", action="store_true", help="the shape of TinyStories-33M")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        directory = wide_network(folder) if args.wide else str(POCKET / "lm")
        model, _ = load_model(directory, PROMPT, LENGTH)
        theirs = transformers.GPTNeoForCausalLM.from_pretrained(directory).float().eval()
        print("| K | sampling | one pass | TSMC | `generate` | by sampling | by TSMC |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for rows in args.rows:
            found = seconds(model, theirs, rows)
            cells = [f"{number:.2f}" for number in found.values()]
            cells += [f"{found['generate'] / found[name]:.2f}" for name in ("sampling", "TSMC")]
            print(f"| {rows} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
