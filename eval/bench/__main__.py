"""How fast this project is, beside transformers and beside what the hardware allows: `python -m eval.bench`.

Every contest runs its sides in turn in one process (A B A B ...), with a matrix product and a copy among them, so that they
all meet the same machine; medians count. The sides have the same weights. transformers samples by `generate` with top_k
off, scores texts in the order given in batches of 64 padded to the longest, and trains on prompt and continuation.
"Over limit" is our time over the least that the matrix products or the memory traffic can take (`roofline.py`).
The networks are those of `contestants.py`. The potential of TSMC here costs nothing: scoring is measured by itself.
"""

import argparse
import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from distill.finetune import parameter_groups
from distill.self_distill import negative_log_likelihood
from eval.bench.contestants import (
    BATCH,
    Sampler,
    Scorer,
    counterparts,
    import_transformers,
    load_sampler,
    load_scorers,
    make_texts,
    score_in_order,
)
from eval.bench.growth import LENGTH, bench_growth, free_potential, in_fresh_process, peak_of
from eval.bench.roofline import Work, distillation_work, encoder_work, probes, rates_of, sampling_work
from eval.bench.whole import bench_main
from eval.run.command import one_line_errors
from eval.run.options import DistillConfig, OneLineParser, RunConfig
from eval.run.plan import seconds_of
from eval.run.table import align
from eval.scorers import toxicity
from eval.scorers.encoder import Runner
from tinystories import Conditional, InputError
from tinystories.checkpoint import write_json
from tinystories.fast import keep_freed_memory
from tsmc import sample_proposal, tsmc

PARTICLES, QUICK_PARTICLES = (50, 100, 1000), (100,)


@dataclass
class Contest:
    """Ways of ours, each with its work, against ways of theirs to do the same."""

    ours: dict[str, Callable[[], object]]
    theirs: dict[str, Callable[[], object]]
    work: dict[str, Work]
    repeats: int


def sampling_contest(sampler: Sampler, theirs: dict[str, nn.Module], particles: int, repeats: int) -> Contest:
    """Plain sampling and TSMC with the twist, each against `generate`, which has no twist."""
    config = import_transformers().GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=LENGTH, pad_token_id=0, eos_token_id=None
    )
    prompt = sampler.prompt
    model = Conditional(sampler.lm, prompt, LENGTH)
    source = torch.Generator(prompt.device).manual_seed(0)
    ids = prompt.expand(particles, -1)
    sizes = (particles, len(prompt), LENGTH)
    names = f"sampling, K = {particles}", f"TSMC, K = {particles}"
    return Contest(
        ours={
            names[0]: lambda: sample_proposal(model, None, particles, source),
            names[1]: lambda: tsmc(model, sampler.twist, free_potential, particles, source),
        },
        theirs={
            name: lambda twin=twin: twin.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
            for name, twin in theirs.items()
        },
        work={
            names[0]: sampling_work(sampler.lm, None, *sizes),
            names[1]: sampling_work(sampler.lm, sampler.twist, *sizes),
        },
        repeats=repeats,
    )


def scoring_contests(scorers: dict[str, Scorer], repeats: int) -> list[Contest]:
    """The classifier and the sentence encoder on texts of equal and of mixed lengths."""
    contests = []
    for label, scorer in scorers.items():
        runner, theirs = Runner(scorer.network, scorer.tokenizer, BATCH), counterparts(scorer.network)
        for mixed in (False, True):
            texts = make_texts(scorers, mixed)
            lengths = [len(encoding.ids) for encoding in runner.tokenizer.encode_batch(texts)]
            name = f"{label}, {len(texts)} texts of {min(lengths)}{f' to {max(lengths)}' if mixed else ''} tokens"
            contests.append(
                Contest(
                    ours={name: lambda runner=runner, texts=texts: runner(texts)},
                    theirs={
                        kind: lambda twin=twin, runner=runner, texts=texts: score_in_order(twin, runner, texts)
                        for kind, twin in theirs.items()
                    },
                    work={name: encoder_work(scorer.network.config, lengths)},
                    repeats=repeats,
                )
            )
    return contests


def distillation_contest(sampler: Sampler, repeats: int) -> Contest:
    """One AdamW step on the default batch: ours, and transformers on prompt and continuation at once."""
    rows, prompt = DistillConfig().batch_size, sampler.prompt
    tokens = torch.randint(sampler.lm.config.vocab_size, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(prompt.device)
    ids = torch.cat([prompt.expand(rows, -1), tokens], 1)  # [B, P + T]
    labels = ids.index_fill(1, torch.arange(len(prompt), device=ids.device), -100)  # the prompt is not learned

    def step(network: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
        optimizer = torch.optim.AdamW(parameter_groups(list(network.parameters()), 0.01), lr=0.0)

        def run() -> None:
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()

        return run

    student = copy.deepcopy(sampler.lm)
    model = Conditional(student, prompt, LENGTH)
    twins = counterparts(student)
    name = f"distillation step, {rows} samples"
    return Contest(
        ours={name: step(student, lambda: negative_log_likelihood(model, tokens, len(tokens)))},
        theirs={k: step(twin, lambda twin=twin: twin(ids, labels=labels).loss) for k, twin in twins.items()},
        work={name: distillation_work(student, rows, len(prompt), LENGTH)},
        repeats=repeats,
    )


def measure(contest: Contest, device: torch.device, dtype: torch.dtype) -> list[dict]:
    """One record for each of our ways: seconds of both sides, the limit, and the rates it came from."""
    seconds = seconds_of(contest.ours | contest.theirs | probes(device, dtype), contest.repeats, device)
    rates = rates_of(seconds)
    return [
        {
            "name": name,
            "seconds": seconds[name],
            "transformers": {other: seconds[other] for other in contest.theirs},
            "limit": contest.work[name].limit(rates),
            **{f"{unit}_per_second": rate for unit, rate in asdict(rates).items()},
        }
        for name in contest.ours
    ]


def table(records: list[dict]) -> str:
    """Seconds, how many times faster than transformers, seconds at the limit, and ours over it."""
    others = list(records[0]["transformers"])
    lines = [["seconds", "ours", *(f"transformers {o}" for o in others), *(f"faster than {o}" for o in others)]]
    lines[0] += ["limit", "over limit", "GFLOP/s"]
    for record in records:
        ours, theirs = record["seconds"], record["transformers"]
        cells = [record["name"], f"{ours:.4f}", *(f"{theirs[o]:.4f}" for o in others)]
        cells += [f"{theirs[o] / ours:.2f}" for o in others]
        lines.append(
            [
                *cells,
                f"{record['limit']:.4f}",
                f"{ours / record['limit']:.2f}",
                f"{record['flops_per_second'] / 1e9:.0f}",
            ]
        )
    return align(lines)


def change_of_log_phi(scorers: dict[str, Scorer]) -> dict[str, float]:
    """Mean and largest difference that the networks' type makes to log phi of texts, against float32."""
    texts, scorer = make_texts(scorers, mixed=False), scorers["classifier"]
    given = toxicity.ToxicityScorer(scorer.network, scorer.tokenizer)(texts)
    exact = toxicity.ToxicityScorer(copy.deepcopy(scorer.network).float(), scorer.tokenizer)(texts)
    change = RunConfig().beta * (given - exact).abs()
    return {"mean": change.mean().item(), "largest": change.max().item()}


def all_contests(size: str, dtype: torch.dtype, device: torch.device, quick: bool) -> Iterator[Contest]:
    """The contests of one size, one after the other, so that no two hold memory at a time."""
    sampler = load_sampler(size, dtype, device)
    theirs = counterparts(sampler.lm)
    for particles in QUICK_PARTICLES if quick else PARTICLES:
        yield sampling_contest(sampler, theirs, particles, repeats=3 if quick or particles > 100 else 7)
    repeats = 3 if quick else 5
    yield distillation_contest(sampler, repeats)
    del sampler, theirs
    yield from scoring_contests(load_scorers(size, dtype, device), repeats)


def bench_size(size: str, dtype: torch.dtype, device: torch.device, quick: bool) -> dict:
    """Measure one size and print its table."""
    records = []
    for contest in all_contests(size, dtype, device, quick):
        records += measure(contest, device, dtype)
        print(f"measured {size}: {' and '.join(contest.ours)}", file=sys.stderr, flush=True)
    print(f"\n{size}, {dtype}, {device}, {torch.get_num_threads()} threads, T = {LENGTH}\n{table(records)}", flush=True)
    result = {"size": size, "records": records}
    if dtype != torch.float32:
        result["log_phi_change"] = change = change_of_log_phi(load_scorers(size, dtype, device))
        print(f"log phi (beta 10) against float32: {change['mean']:.3f} on average, {change['largest']:.3f} at most")
    particles = (QUICK_PARTICLES if quick else PARTICLES)[-1]
    result["memory"] = {}
    for piece in ("TSMC", "rejection", "scoring"):
        before, peak = in_fresh_process(peak_of, size, dtype, device, piece, particles)
        result["memory"][piece] = {"count": particles, "before": before, "peak": peak}
        sizes = (
            f"{peak / 2**30:.2f} GiB at the peak, {before / 2**30:.2f} before it" if peak else "not told by this system"
        )
        print(f"memory of {piece}, {particles} at once: {sizes}", flush=True)
    return result


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Command line of this script."""
    parser = OneLineParser(
        prog="eval.bench",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--size", choices=("pocket", "paper", "all"), default="all", help="which networks")
    parser.add_argument("--main", action="store_true", help="the whole main job by phase instead, on the pocket preset")
    parser.add_argument(
        "--growth",
        type=Path,
        metavar="PNG",
        help="time and memory against K, T and R instead (pocket unless --size is paper), and a figure",
    )
    parser.add_argument("--quick", action="store_true", help=f"K = {QUICK_PARTICLES[0]} alone, three rounds")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="type of our networks")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of PyTorch")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    return parser.parse_args(arguments)


def bench(args: argparse.Namespace) -> None:
    """Run what the options ask for."""
    if args.threads < 1:
        raise InputError(f"--threads is {args.threads}; give at least 1")
    device = RunConfig(device=args.device).torch_device()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    if args.main:
        if (args.size, args.dtype, args.device, args.json, args.growth) != ("all", "float32", "cpu", None, None):
            raise InputError("--main runs the pocket preset as it is; leave out all but --quick and --threads")
        return bench_main(args.quick)
    if args.growth is not None:
        if (args.dtype, args.device, args.json, args.quick) != ("float32", "cpu", None, False):
            raise InputError("--growth measures float32 on the CPU; leave out all but --size and --threads")
        if args.growth.suffix != ".png" or not args.growth.absolute().parent.is_dir():
            raise InputError(f"--growth {args.growth}: name a .png file in a directory that is there")
        return bench_growth("pocket" if args.size == "all" else args.size, args.growth)
    import_transformers()
    sizes = ("pocket", "paper") if args.size == "all" else (args.size,)
    results = [bench_size(size, getattr(torch, args.dtype), device, args.quick) for size in sizes]
    if args.json is not None:
        machine = {"torch": torch.__version__, "threads": args.threads, "device": str(device), "dtype": args.dtype}
        write_json(args.json, machine | {"sizes": results})


def main(arguments: list[str] | None = None) -> None:
    """Command line to table; bad input ends with one line and exit code 2."""
    with one_line_errors("eval.bench"):
        bench(parse_arguments(arguments))


if __name__ == "__main__":
    main()
