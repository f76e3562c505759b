"""How fast this project is, beside transformers and beside what the hardware allows.

In every race the ways of both sides run in turns in one process (A B A B ...), with a matrix
product and a copy among them, so that all of them meet the same machine; medians count. Both sides
have the same weights. transformers samples by `generate` with top_k off, scores texts in the order
given in batches of 64, and trains on prompt and continuation. The potential of TSMC costs nothing
here, because scoring is measured by itself.
"""

import copy
import runpy
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from distill.finetune import parameter_groups
from distill.self_distill import negative_log_likelihood
from eval.bench import contestants, roofline
from eval.bench.contestants import Networks
from eval.bench.roofline import Work, probes, rates_of, seconds_of
from eval.run.command import one_line_errors
from eval.run.options import DistillConfig, OneLineParser, RunConfig
from eval.run.table import align
from eval.scorers.encoder import Runner
from tinystories import Conditional, InputError
from tinystories.checkpoint import write_json
from tinystories.fast import keep_freed_memory, pack
from tsmc import sample_proposal, tsmc

LENGTH = 20  # T
PARTICLES, QUICK_PARTICLES = (50, 100, 1000), (100,)
Way = Callable[[], object]


def race(
    network: nn.Module,
    ours: dict[str, tuple[Way, Work]],
    theirs: Callable[[nn.Module], Way],
    repeats: int,
) -> list[dict]:
    """A record for each of our ways: the seconds of both sides, the limit, the rate of products.

    `theirs` makes the way of the other side from a counterpart of the network in transformers.
    """
    weight = next(network.parameters())
    ways = {name: way for name, (way, _) in ours.items()}
    twins = contestants.counterparts(network)
    ways |= {name: theirs(twin) for name, twin in twins.items()}
    seconds = seconds_of(ways | probes(weight.device, weight.dtype), repeats, weight.device)
    rates = rates_of(seconds)
    print(f"measured: {' and '.join(ours)}", file=sys.stderr, flush=True)
    return [
        {
            "name": name,
            "seconds": seconds[name],
            "transformers": {twin: seconds[twin] for twin in twins},
            "limit": work.limit(rates),
            "flops_per_second": rates.flops,
        }
        for name, (_, work) in ours.items()
    ]


def race_sampling(networks: Networks, particles: int, repeats: int) -> list[dict]:
    """Plain sampling and TSMC with the twist, each against `generate`, which has no twist."""
    lm, twist, prompt = networks.lm, networks.twist, networks.prompt
    model, psi = Conditional(pack(lm), prompt, LENGTH), pack(twist)
    source = torch.Generator(prompt.device).manual_seed(0)

    def free_potential(tokens: Tensor, log_p: Tensor) -> Tensor:
        return torch.zeros_like(log_p)

    ways = (
        partial(sample_proposal, model, None, particles, source),
        partial(tsmc, model, psi, free_potential, particles, source),
    )
    sizes = (particles, len(prompt), LENGTH)
    works = [roofline.sampling_work(lm, each, *sizes) for each in (None, twist)]
    names = f"sampling, K = {particles}", f"TSMC, K = {particles}"
    ours = dict(zip(names, zip(ways, works, strict=True), strict=True))
    ids = prompt.expand(particles, -1)
    config = contestants.import_transformers().GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=LENGTH, pad_token_id=0, eos_token_id=None
    )
    inputs = {"attention_mask": torch.ones_like(ids), "generation_config": config}
    return race(lm, ours, lambda twin: partial(twin.generate, ids, **inputs), repeats)


def training_step(network: nn.Module, loss: Callable[[], Tensor]) -> Way:
    """A step of AdamW that leaves the weights as they are."""
    optimizer = torch.optim.AdamW(parameter_groups(network.parameters(), 0.01), lr=0.0)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def race_distillation(networks: Networks, repeats: int) -> list[dict]:
    """A gradient step on the default batch: ours, and transformers on prompt and continuation."""
    prompt, rows, student = networks.prompt, DistillConfig().batch_size, copy.deepcopy(networks.lm)
    model = Conditional(student, prompt, LENGTH)
    tokens = torch.randint(student.config.vocab_size, (rows, LENGTH), device=prompt.device)
    ids = torch.cat([prompt.expand(rows, -1), tokens], 1)  # [B, P + T]
    labels = ids.clone()
    labels[:, : len(prompt)] = -100  # the prompt is not learned
    step = training_step(student, lambda: negative_log_likelihood(model, tokens, rows))
    work = roofline.distillation_work(student, rows, len(prompt), LENGTH)
    ours = {f"distillation step, {rows} samples": (step, work)}

    def theirs(twin: nn.Module) -> Way:
        return training_step(twin, lambda: twin(ids, labels=labels).loss)

    return race(student, ours, theirs, repeats)


def race_scoring(networks: Networks, label: str, is_mixed: bool, repeats: int) -> list[dict]:
    """The classifier or the sentence encoder on texts of equal or of mixed lengths."""
    network, tokenizer = networks.scorers[label]
    runner = Runner(pack(network), tokenizer, contestants.BATCH)
    texts = contestants.make_texts(is_mixed)
    lengths = [len(encoding) for encoding in runner.tokenizer.encode_batch(texts)]
    span = f"{min(lengths)} to {max(lengths)}" if is_mixed else f"{lengths[0]}"
    work = roofline.encoder_work(network.config, lengths)
    ours = {f"{label}, {len(texts)} texts of {span} tokens": (partial(runner, texts), work)}

    def theirs(twin: nn.Module) -> Way:
        return partial(contestants.score_in_order, twin, runner, texts)

    return race(network, ours, theirs, repeats)


def table(records: list[dict]) -> str:
    """Seconds, how many times faster than transformers, the limit, and our time over it."""
    others = list(records[0]["transformers"])
    head = ["seconds", "ours", *(f"transformers {name}" for name in others)]
    head += [*(f"faster than {name}" for name in others), "limit", "over limit", "GFLOP/s"]
    lines = [head]
    for record in records:
        ours, theirs, limit = record["seconds"], record["transformers"], record["limit"]
        line = [record["name"], f"{ours:.4f}", *(f"{theirs[name]:.4f}" for name in others)]
        line += [*(f"{theirs[name] / ours:.2f}" for name in others), f"{limit:.4f}"]
        lines.append([*line, f"{ours / limit:.2f}", f"{record['flops_per_second'] / 1e9:.0f}"])
    return align(lines)


def bench_size(size: str, dtype: torch.dtype, device: torch.device, quick: bool) -> dict:
    """Measure one size and print its table."""
    networks = contestants.load_networks(size, dtype, device)
    repeats, records = 3 if quick else 5, []
    for particles in QUICK_PARTICLES if quick else PARTICLES:
        records += race_sampling(networks, particles, repeats)
    records += race_distillation(networks, repeats)
    for label in networks.scorers:
        records += race_scoring(networks, label, False, repeats)
        records += race_scoring(networks, label, True, repeats)
    threads = torch.get_num_threads()
    print(f"\n{size}, {dtype}, {device}, {threads} threads, T = {LENGTH}\n{table(records)}")
    return {"size": size, "records": records}


def bench_main(quick: bool) -> dict:
    """The main job, with the pocket networks, beside the limit of its matrix products.

    It runs once to be timed and once to be counted, because counting delays every operation.
    """
    generations, cpu = 0 if quick else 2, torch.device("cpu")
    rate = rates_of(seconds_of(probes(cpu, torch.float32), 3, cpu)).flops
    main_job = runpy.run_module("main")["main"]
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--generations", str(generations), "--out"]
        began = time.perf_counter()
        main_job([*arguments, f"{folder}/timed"])
        seconds = time.perf_counter() - began
        with roofline.counter() as operations:
            main_job([*arguments, f"{folder}/counted"])
    flops = operations.get_total_flops()
    limit = flops / rate
    print(f"\nmain.py --generations {generations}, {torch.get_num_threads()} threads")
    print(f"{seconds:.1f} s, {seconds / limit:.2f} times the limit of {limit:.1f} s, which")
    print(f"{flops / 1e9:.0f} GFLOP of products take at {rate / 1e9:.0f} GFLOP/s")
    return {"seconds": seconds, "flops": flops, "limit": limit}


def main(arguments: list[str] | None = None) -> None:
    """Command line to table; bad input ends with one line and exit code 2."""
    with one_line_errors("eval.bench"):
        parser = OneLineParser("eval.bench", description=__doc__.split("\n")[0])
        add = parser.add_argument
        add("--size", choices=("pocket", "paper", "all"), default="all", help="which networks")
        add("--main", action="store_true", help="instead, main.py as it is, with pocket networks")
        add("--quick", action="store_true", help="K = 100 only, fewer repeats, no generations")
        add("--dtype", choices=("float32", "bfloat16"), default="float32", help="our type")
        add("--device", default="cpu", help="cpu, cuda or cuda:N")
        add("--threads", type=int, default=torch.get_num_threads(), help="threads of PyTorch")
        add("--json", type=Path, help="file to write the figures to")
        args = parser.parse_args(arguments)
        if args.threads < 1:
            raise InputError(f"--threads is {args.threads}; give at least 1")
        device, dtype = RunConfig(device=args.device).torch_device(), getattr(torch, args.dtype)
        torch.set_num_threads(args.threads)
        keep_freed_memory()
        results = {"torch": torch.__version__, "threads": args.threads}
        if args.main:
            results["main"] = bench_main(args.quick)
        else:
            sizes = ("pocket", "paper") if args.size == "all" else (args.size,)
            results |= {"device": str(device), "dtype": args.dtype}
            results["sizes"] = [bench_size(size, dtype, device, args.quick) for size in sizes]
        if args.json is not None:
            write_json(args.json, results)


if __name__ == "__main__":
    main()
