"""How fast this project is, beside transformers and beside what the hardware allows.

In every race the ways of both sides run in turns in one process (A B A B ...), so that all of them
meet the same machine; medians count. transformers has the same weights; it samples by `generate`
with top_k off, scores texts in the order given, and trains on prompt and continuation. The
potential of TSMC costs nothing here, because scoring is measured by itself. K particles, T tokens,
P tokens of the prompt, B rows.
"""

import sys

from eval.run.command import stop

try:
    import transformers  # noqa: F401
except ImportError:
    stop("eval.bench", "error: it needs transformers; pip install -r requirements-dev.txt", 2)

# isort: split
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from distill.finetune import parameter_groups
from distill.published import PublishedOptions
from eval.bench import contestants, limit
from eval.bench.contestants import Networks, score_in_order
from eval.bench.limit import Way
from eval.run.command import OneLineParser, one_line_errors
from eval.run.options import DTYPES, RunConfig
from eval.scorers.encoder import Runner
from eval.table import align
from tinystories import Conditional
from tsmc import sample_proposal, tsmc

LENGTH = 20  # T
PARTICLES, QUICK_PARTICLES = (50, 100, 1000), (100,)
Ways = dict[str, tuple[Way, float]]  # by name, with the operations of their products


def race(
    network: nn.Module, ours: Ways, theirs: Callable[[nn.Module], Way], repeats: int
) -> list[dict]:
    """Seconds of our ways, of theirs in float32 and in our type, and the limit of the operations.

    theirs(network) makes the way of transformers.
    """
    weight = next(network.parameters())
    twins = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, weight.dtype)}
    ways = {name: way for name, (way, _) in ours.items()}
    for twin, dtype in twins.items():
        ways[twin] = theirs(contestants.counterpart(network, dtype))
    seconds, rate = limit.measure(ways, repeats, weight)
    print(f"measured: {' and '.join(ours)}", file=sys.stderr, flush=True)
    others = {twin: seconds[twin] for twin in twins}
    return [
        {"name": name, "seconds": seconds[name], "transformers": others, "limit": flops / rate}
        for name, (_, flops) in ours.items()
    ]


def race_sampling(networks: Networks, particles: int, repeats: int) -> list[dict]:
    """Plain sampling and TSMC with the twist, each against `generate`, which has no twist."""
    lm, twist, prompt = networks.lm, networks.twist, networks.prompt
    model, psi = Conditional(lm, prompt, LENGTH), twist
    source = torch.Generator(prompt.device).manual_seed(0)
    sample = partial(sample_proposal, model, None, particles, source)
    resample = partial(tsmc, model, psi, lambda tokens, log_p: 0 * log_p, particles, source)
    sizes = (particles, len(prompt), LENGTH)
    ours = {
        f"sampling, K = {particles}": (sample, limit.sampling_flops(lm, None, *sizes)),
        f"TSMC, K = {particles}": (resample, limit.sampling_flops(lm, twist, *sizes)),
    }
    ids = prompt.expand(particles, -1)  # [K, P]
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": LENGTH, "pad_token_id": 0}

    def theirs(twin: nn.Module) -> Way:
        twin.generation_config.update(**settings, eos_token_id=None)
        return partial(twin.generate, ids, attention_mask=torch.ones_like(ids))

    return race(lm, ours, theirs, repeats)


def training_step(network: nn.Module, loss: Callable[[], Tensor]) -> Way:
    """A step of AdamW that leaves the weights as they are."""
    optimizer = torch.optim.AdamW(parameter_groups(network.parameters(), 0.01), lr=0.0)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def race_distillation(networks: Networks, repeats: int) -> list[dict]:
    """A gradient step on a batch of the published learner."""
    student, prompt, rows = networks.lm, networks.prompt, PublishedOptions().distill_batch_size
    model = Conditional(student, prompt, LENGTH)
    tokens = torch.randint(student.config.vocab_size, (rows, LENGTH), device=prompt.device)
    ids = torch.cat([prompt.expand(rows, -1), tokens], 1)  # [B, P + T]
    labels = nn.functional.pad(tokens, (len(prompt), 0), value=-100)  # the prompt is not learned
    step = training_step(student, lambda: -model.log_probs(tokens)[0].mean())
    flops = 3 * limit.sampling_flops(student, None, rows, len(prompt), LENGTH)  # backward is 2

    def theirs(twin: nn.Module) -> Way:
        return training_step(twin, lambda: twin(ids, labels=labels).loss)

    return race(student, {f"distillation step, {rows} samples": (step, flops)}, theirs, repeats)


def race_scoring(networks: Networks, label: str, repeats: int) -> list[dict]:
    """The classifier or the sentence encoder on texts of many lengths."""
    network, tokenizer = networks.scorers[label]
    runner = Runner(network, tokenizer, contestants.BATCH)
    texts = contestants.make_texts()
    lengths = [len(encoding) for encoding in runner.tokenizer.encode_batch(texts)]
    name = f"{label}, {len(texts)} texts of {min(lengths)} to {max(lengths)} tokens"
    ours = {name: (partial(runner, texts), limit.encoder_flops(network.config, lengths))}
    return race(network, ours, lambda twin: partial(score_in_order, twin, runner, texts), repeats)


def table(records: list[dict]) -> str:
    """Seconds, how many times faster than transformers, the limit, and our time over it."""
    twins = [column for twin in records[0]["transformers"] for column in (twin, "faster")]
    lines = [["seconds", "ours", *twins, "limit", "over limit"]]
    for record in records:
        ours, least = record["seconds"], record["limit"]
        line = [record["name"], f"{ours:.4f}"]
        for theirs in record["transformers"].values():
            line += [f"{theirs:.4f}", f"{theirs / ours:.2f}"]
        lines.append([*line, f"{least:.4f}", f"{ours / least:.2f}"])
    return align(lines)


def bench_size(size: str, dtype: torch.dtype, device: torch.device, quick: bool) -> list[dict]:
    """Measure one size, print its table and return its records."""
    networks = contestants.load_networks(size, dtype, device)
    repeats = 3 if quick else 5
    records = []
    for particles in QUICK_PARTICLES if quick else PARTICLES:
        records += race_sampling(networks, particles, repeats)
    records += race_distillation(networks, repeats)
    for label in networks.scorers:
        records += race_scoring(networks, label, repeats)
    print(f"\n{size}, {dtype}, {device}, {torch.get_num_threads()} threads\n{table(records)}")
    return records


def main(arguments: list[str] | None = None) -> None:
    """Command line to table; bad input ends with one line and exit code 2."""
    with one_line_errors("eval.bench"):
        parser = OneLineParser("eval.bench", description=__doc__.split("\n")[0])
        add = parser.add_argument
        add("--size", choices=("pocket", "paper", "all"), default="all", help="which networks")
        add("--quick", action="store_true", help="K = 100 only, fewer repeats")
        add("--dtype", choices=DTYPES, default="float32", help="our type")
        add("--device", default="cpu", help="cpu, cuda or cuda:N")
        args = parser.parse_args(arguments)
        device = RunConfig(device=args.device).torch_device()
        for size in ("pocket", "paper") if args.size == "all" else (args.size,):
            bench_size(size, DTYPES[args.dtype], device, args.quick)


if __name__ == "__main__":
    main()
