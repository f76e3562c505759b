"""Where resampling pays: `python -m eval.prefix --out docs/prefix.png`

    log phi(s_{1:T}) = -2 (letters e in the text),   log f_t(s_{1:t}) = the same of a beginning

Each way to sample draws R = 100 independent runs of K particles, so all have equally many tokens
and compute phi R K times; f is computed R K (T - 1) times where ESS < K/2 resamples. A line has the
mean of log Z-hat with its 95 % interval over runs, its spread, and the seconds; the gain over the
last token alone has an interval of its own. log Z is exact in a world of 3^8 texts and otherwise
comes from all runs of the last way with the largest K.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import tinystories
from distill.options import check
from eval.figures import COLOURS, DASHES, MARKERS, save_figure
from eval.run.command import one_line_errors
from eval.run.options import POCKET, OneLineParser
from tsmc import SCHEMES, Phases, Sigma
from tsmc.estimate import Estimate, difference, mean_estimate
from tsmc.exact import TableModel, Target
from tsmc.interfaces import LanguageModel, LogPrefix, Twist
from tsmc.rejection import log_mean_with_error
from tsmc.runs import draw_population

PROMPT = "Once upon a time, there was a"
STRENGTH = 2.0  # nats for each letter e


@dataclass(frozen=True)
class Way:
    """A way to sample sigma."""

    title: str
    sigma: Sigma
    twist: Twist | None
    ess_threshold: float


def both(title: str, sigma: Sigma, twist: Twist | None, log_f: LogPrefix) -> list[Way]:
    """Resampling at the last token alone, and where ESS < K/2 by the prefix part log f."""
    early = Sigma(sigma.model, sigma.log_potential, log_f)
    last = Way(f"{title}, last token", sigma, twist, 0.0)
    return [last, Way(f"{title}, ESS < K/2", early, twist, 0.5)]


def cost_ways(model: LanguageModel, costs: Tensor) -> list[Way]:
    """log phi = -sum of costs [V] of the tokens; p proposes, or p tilted by the next token's."""
    sigma = Sigma(model, lambda tokens, log_p: -costs[tokens].sum(-1))

    def tilt(hidden: Tensor) -> Tensor:
        """log psi [N, V] = -cost of the next token: then f_t is that of the tokens before."""
        return -costs.expand(len(hidden), -1)

    ways = both("p", sigma, None, lambda tokens: -costs[tokens].sum(-1))
    return ways + both("tilted", sigma, tilt, lambda tokens: -costs[tokens[:, :-1]].sum(-1))


def compare(title: str, ways: list[Way], sizes: list[int], runs: int, exact: float | None) -> dict:
    """Print the lines of every way and K, and what each pair of ways differs by."""
    print(f"\n{title}\n{'':20}     K  mean log Z-hat   spread  seconds")
    found: dict[tuple[str, int], Estimate] = {}
    for particles in sorted(sizes):
        before = None
        for way in ways:
            began = time.perf_counter()
            given = (Phases(rows=5000), way.title, None, way.sigma, way.twist, particles, runs)
            rule = {"resample": SCHEMES["systematic"], "ess_threshold": way.ess_threshold}
            log_z = draw_population(*given, **rule).log_z  # [R]
            mean = mean_estimate(log_z)
            numbers = f"{mean.value:8.2f} +-{mean.half_width():5.2f} {log_z.std():7.2f}"
            seconds = time.perf_counter() - began
            print(f"{way.title:20} {particles:5} {numbers} {seconds:8.0f}", flush=True)
            if before is not None and way.ess_threshold > 0:
                gain = difference(mean, before)
                print(f"{'':20} gain {gain.value:8.2f} +-{gain.half_width():5.2f}", flush=True)
            before = found[way.title, particles] = mean
    evidence = Estimate(*log_mean_with_error(log_z), runs - 1.0)
    truth = evidence.value if exact is None else exact
    source = f"+- {evidence.half_width():.2f}" if exact is None else "exactly"
    print(f"log Z = {truth:.2f} {source}", flush=True)
    return {"title": title, "log_z": truth, "found": found}


def draw(tables: list[dict], path: Path) -> None:
    """A panel for each table: mean log Z-hat - log Z against K, a line for each way."""
    figure, panels = plt.subplots(1, len(tables), figsize=(3.1 * len(tables), 3), squeeze=False)
    for axes, table in zip(panels[0], tables, strict=True):
        for i, title in enumerate(dict.fromkeys(way for way, _ in table["found"])):
            points = [(k, x) for (way, k), x in table["found"].items() if way == title]
            error = [x.half_width() for _, x in points]
            below = [x.value - table["log_z"] for _, x in points]
            look = {"color": COLOURS[i // 2], "ls": DASHES[i % 2], "marker": MARKERS[i]}
            axes.errorbar([k for k, _ in points], below, error, label=title, capsize=2, **look)
        axes.axhline(0, color="black", lw=0.8)
        axes.set(xscale="log", xlabel="K", title=table["title"])
        sizes = sorted({k for _, k in table["found"]})
        axes.set_xticks(sizes, [str(k) for k in sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("mean log Z-hat - log Z")
    panels[0][0].legend(fontsize="small")
    save_figure(figure, path)


def tables(lengths: list[int], sizes: list[int], runs: int) -> Iterator[dict]:
    """The enumerable world, and the pocket model for each length."""
    model = TableModel.random(3, 8, torch.Generator().manual_seed(0))
    ways = cost_ways(model, torch.tensor([STRENGTH, 0.0, 0.0]).double())
    exact = Target(model, ways[0].sigma.log_potential).log_z
    yield compare("3^8 texts", ways, sizes, runs, exact)
    network, tokenizer = tinystories.load(POCKET / "lm")
    prompt = torch.tensor(tokenizer.encode(PROMPT).ids)
    texts = tokenizer.decode_batch([[v] for v in range(network.config.vocab_size)])
    costs = STRENGTH * torch.tensor([text.count("e") for text in texts]).float()
    for length in lengths:
        model = tinystories.Conditional(network, prompt, length)
        yield compare(f"T = {length}", cost_ways(model, costs), sizes, runs, None)


def main(arguments: list[str] | None = None) -> None:
    """Print the tables and draw the figure; bad input: one line, code 2."""
    with one_line_errors("eval.prefix", "lower --particles"), torch.no_grad():
        parser = OneLineParser(prog="eval.prefix", description=__doc__.splitlines()[0])
        add = parser.add_argument
        add("--out", type=Path, required=True, help="PNG to write")
        add("--lengths", type=int, nargs="*", default=[20, 40, 60, 80], help="T [20 40 60 80]")
        add("--particles", type=int, nargs="+", default=[10, 50], help="K [10 50]")
        add("--runs", type=int, default=100, help="R [100]")
        args = parser.parse_args(arguments)
        check("--runs", args.runs, low=2)
        for size in args.particles + args.lengths:
            check("--particles or --lengths", size, low=1)
        draw(list(tables(args.lengths, args.particles, args.runs)), args.out)


if __name__ == "__main__":
    main()
