"""The lesson: every estimator beside its exact value. `python -m eval.lesson --out lesson.png`

    p(s_{1:6}) from a random table over 4 tokens;   log phi(s) = -(sum_t s_t - 15)^2 / 6

The potential judges the whole sequence and is near zero on most of them, so a sampler must look
ahead, which is what the twist is for. All 4^6 sequences are enumerated. Each line of the table has
the exact value, the estimate, its standard error, and their distance in standard errors, rarely
more than two; bounds may be wrong on one side only. The figure shows log Z-hat against the number
of particles K for three proposals: p, a learned twist, the optimal twist.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Generator, Tensor

from distill.options import check
from eval.figures import COLOURS, MARKERS, save_figure
from eval.run.command import one_line_errors
from eval.run.options import OneLineParser
from tsmc.bounds import BoundsProblem, bidirectional_bounds
from tsmc.estimate import Estimate, mean_estimate
from tsmc.exact import TableModel, TableTwist, Target
from tsmc.interfaces import Twist
from tsmc.proposal import sample_proposal
from tsmc.rejection import draw_accepted, exact_samples
from tsmc.resampling import SCHEMES, multinomial
from tsmc.sampler import Sigma, tsmc
from twist import ctl

VOCABULARY, LENGTH, PARTICLES, RUNS = 4, 6, 16, 1000
Lines = Iterator[tuple[str, float, Estimate, str]]
"""The quantity, its exact value, the estimate, and "lower" or "upper" if that is a bound."""


def log_phi(tokens: Tensor, log_p: Tensor | None = None) -> Tensor:
    """log phi [N] of tokens [N, T]: the sum of the tokens should be 15."""
    return -(tokens.sum(-1) - 15).double().square() / 6


def learned_twist(model: TableModel, generator: Generator) -> TableTwist:
    """A table twist after a short training, good but not perfect."""
    twist = TableTwist.ones(model)
    optimizer = torch.optim.Adam(twist.parameters(), lr=0.03)
    draw_batch = ctl.batches_from_proposal(Sigma(model, log_phi), twist, 200, generator)
    ctl.learn_twist(twist, optimizer, draw_batch, 150)
    return twist


def evidence(model: TableModel, twist: Twist, target: Target, generator: Generator) -> Lines:
    """Z-hat under every way to resample, and the mean of a function of the samples."""
    exact_z = math.exp(target.log_z)
    ways = [(f"{name}, every step", scheme, 1.0) for name, scheme in SCHEMES.items()]
    ways += [("multinomial, ESS < K / 2", multinomial, 0.5), ("no resampling", multinomial, 0.0)]
    given = (model, twist, log_phi, PARTICLES, generator, RUNS)
    for name, scheme, threshold in ways:
        runs = tsmc(*given, scheme, threshold)
        yield f"Z: {name}", exact_z, mean_estimate(runs.log_z.exp()), ""
    share = (runs.tokens[:, :, 0] == 3).double()  # [R, K]
    weighted = (runs.log_z.exp()[:, None] * runs.log_weights.softmax(-1) * share).sum(-1)  # [R]
    exact = exact_z * target.token_marginals()[0, 3].exp().item()
    yield "Z sigma(s_1 = 3): weighted particles", exact, mean_estimate(weighted), ""
    conditional = tsmc(*given, reference=target.sample(RUNS, generator))
    yield "1 / Z: conditional runs", 1 / exact_z, mean_estimate((-conditional.log_z).exp()), ""


def divergences(
    sigma: Sigma, twist: TableTwist, target: Target, samples: Tensor, generator: Generator
) -> Lines:
    """log Z and both divergences from bidirectional bounds, with and without resampling."""
    log_q = target.tree.prefix_log_q(twist)[-1].detach()
    for name, threshold in (("TSMC", 1.0), ("importance sampling", 0.0)):
        problem = BoundsProblem(sigma, twist, PARTICLES, threshold)
        bounds = bidirectional_bounds(problem, samples, RUNS, generator)
        brackets = [("log Z", target.log_z, bounds.log_z)]
        brackets += [("KL(q || sigma)", target.kl_from(log_q), bounds.kl_from_proposal)]
        brackets += [("KL(sigma || q)", target.kl_to(log_q), bounds.kl_from_target)]
        for quantity, exact, bracket in brackets:
            yield f"{quantity}: lower bound, {name}", exact, bracket.lower, "lower"
            yield f"{quantity}: upper bound, {name}", exact, bracket.upper, "upper"


def gradient(model: TableModel, target: Target, generator: Generator) -> Lines:
    """The CTL gradient at psi = 1 along its own direction, so the exact value is its length."""
    twist = TableTwist.ones(model)
    exact = torch.autograd.grad(target.ctl_loss(twist), twist.log_psi)[0]
    values = []
    for _ in range(200):
        batch = sample_proposal(model, twist, 1000, generator, keep_hidden=True)
        positive = ctl.positive_log_weights(batch, log_phi)
        loss = ctl.ctl_loss(twist, ctl.weigh(batch, positive, ctl.negative_log_weights(batch)))
        estimate = torch.autograd.grad(loss, twist.log_psi)[0]
        values.append((estimate * exact).sum() / exact.norm())
    mean = mean_estimate(torch.stack(values))
    yield "CTL gradient along the exact one", exact.norm().item(), mean, ""


def lines(model: TableModel, twist: TableTwist, target: Target, generator: Generator) -> Lines:
    """Every line of the table."""
    exact = exact_samples(draw_accepted(model, log_phi, 20000, generator))
    yield "log Z: base samples", target.log_z, exact.evidence(), ""
    mean = (target.log_sigma[-1].exp() * target.log_psi[-1]).sum().item()
    yield "E_sigma[log phi]: rejection", mean, mean_estimate(exact.log_phi), ""
    yield from evidence(model, twist, target, generator)
    yield from divergences(Sigma(model, log_phi), twist, target, exact.tokens[:50], generator)
    yield from gradient(model, target, generator)


def verdict(exact: float, estimate: Estimate, side: str) -> str:
    """Distance in standard errors, or whether a bound is on its side within three of them."""
    distance = (estimate.value - exact) / estimate.std_error
    if not side:
        return f"{distance:+.1f} errors apart"
    excess = distance if side == "lower" else -distance
    return "holds" if excess < 3 else f"BROKEN by {excess:.1f} errors"


def figure(model: TableModel, twists: dict, log_z: float, path: Path, generator: Generator) -> None:
    """Mean and middle 80 % of log Z-hat over 400 runs against K, for each twist by its name."""
    picture, axes = plt.subplots(figsize=(6.5, 4.2))
    axes.axhline(log_z, color="black", lw=1, ls="--", label="exact log Z")
    counts = [2**power for power in range(9)]
    for (name, twist), colour, marker in zip(twists.items(), COLOURS, MARKERS, strict=False):
        drawn = [tsmc(model, twist, log_phi, count, generator, 400).log_z for count in counts]
        runs = torch.stack(drawn)  # [C, R]
        low, high = runs.quantile(0.1, 1), runs.quantile(0.9, 1)
        axes.fill_between(counts, low, high, color=colour, alpha=0.2, lw=0)
        axes.plot(counts, runs.mean(1), color=colour, marker=marker, ms=5, label=name)
    axes.set(xlabel="particles K", ylabel="log Z-hat: mean, middle 80 %", xscale="log")
    axes.set_xticks(counts, counts)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(picture, path)


def main() -> None:
    """Command line to table and figure; bad input ends with one line and exit code 2."""
    with one_line_errors("eval.lesson"):
        parser = OneLineParser(prog="eval.lesson", description=__doc__.splitlines()[0])
        parser.add_argument("--out", type=Path, default=Path("lesson.png"), help="the figure")
        parser.add_argument("--seed", type=int, default=0, help="of everything random")
        args = parser.parse_args()
        check("--seed", args.seed, low=0, high=2**63 - 1)
        generator = Generator().manual_seed(args.seed)
        model = TableModel.random(VOCABULARY, LENGTH, generator)
        target = Target(model, log_phi)
        twist = learned_twist(model, generator)
        optimal = TableTwist(target.optimal_log_psi())
        proposals = {"q = p": None, "learned twist": twist, "optimal twist": optimal}
        log_q = {name: target.tree.prefix_log_q(psi)[-1] for name, psi in proposals.items()}
        exact = ", ".join(f"{name} {target.kl_to(level):.4f}" for name, level in log_q.items())
        print(f"{'KL(sigma || q), exact':50} {exact}")
        print(f"{'estimator':50} {'exact':>10} {'estimate':>10} {'error':>9}")
        for name, value, estimate, side in lines(model, twist, target, generator):
            numbers = f"{value:10.5f} {estimate.value:10.5f} {estimate.std_error:9.5f}"
            print(f"{name:50} {numbers}  {verdict(value, estimate, side)}", flush=True)
        figure(model, proposals, target.log_z, args.out, generator)
        print(f"figure in {args.out}")


if __name__ == "__main__":
    main()
