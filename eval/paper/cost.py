"""What Algorithm 1 spends, and how many updates of a baseline spend as much.

    unit: one token of one sequence through p^(0); forward with backward counts three
    any other network: its parameters / those of p^(0)

Counted are drawing, reading and learning, not the evaluation; the texts that phi scores are counted
apart. The first position belongs to the prompt, whose states all rows share, and is left out. A row
that is drawn repeatedly passes p^(0) once: the largest possible number of different rows counts.
"""

from dataclasses import replace
from typing import NamedTuple

from distill.finetune import BaselineConfig
from eval.paper.study import METHODS, Study
from eval.run.options import RunConfig
from tinystories import GPTNeo
from twist.surrogate import ITERATIONS


class Spent(NamedTuple):
    """Sequences through p^(0), those through other networks in the same unit, texts scored."""

    model: int
    others: float
    scored: int

    def units(self, length: int) -> int:
        """Token positions for T = length."""
        return round((self.model + self.others) * (length - 1))


def mlp_size(width: int, hidden_units: int, outputs: int) -> int:
    """The parameters of a TwistMLP."""
    return (width + 1 + hidden_units + 1) * hidden_units + (hidden_units + 1) * outputs


def published_cost(config: RunConfig, network: GPTNeo) -> Spent:
    """As published. CTL learns from chosen tokens alone, the others cost it nothing.

    p^(0) reads every sequence of a generation m >= 1 for the effective potential phi^(m).
    """
    last, learning = config.generations, config.ctl.updates * config.ctl.batch_size
    drawn = config.distill.runs * config.particles  # in every generation but the last
    sampled = (last + 1) * learning + last * drawn
    read = sampled - learning - drawn if last and config.effective_potential else 0
    trained = last * config.distill.updates * config.distill.batch_size
    width, hidden_units = network.config.hidden_size, config.ctl.hidden_units
    others = sampled * mlp_size(width, hidden_units, network.config.vocab_size)
    others += 3 * (last + 1) * learning * mlp_size(width, hidden_units, 1)
    return Spent(sampled + read + 3 * trained, others / size(network), sampled)


def default_cost(config: RunConfig, network: GPTNeo) -> Spent:
    """With the pool, an adapter of p^(0) (of which only its own products count), and V."""
    width = network.config.hidden_size + 1  # with z, and with the surrogate's embedding
    adapter = mlp_size(width, config.distill.hidden_units, width)
    adapter += width * network.config.vocab_size
    value = mlp_size(width, config.value.hidden_units, 1)
    distilled = config.distill.updates * config.distill.batch_size
    contrasted = config.value.updates * config.value.batch_size
    climbed = config.pool.first_updates * config.distill.batch_size
    first, sizes = config.pool.first_draws, config.pool.first_sizes()
    drawn = config.value.negatives
    model, others = first, (first - sizes[0]) * adapter
    for r in range(1, len(sizes)):  # pools of the ladder
        pool = sum(sizes[:r])
        model += min(climbed, pool)
        others += 3 * (climbed * adapter + ITERATIONS * pool)
    for m in range(config.generations + 1):
        new = config.pool.draws if m > 0 else 0
        pool = first + m * config.pool.draws
        model += new + min(distilled, pool) + min(contrasted, pool) + drawn + min(drawn, pool)
        others += (new + drawn) * adapter
        others += 3 * (distilled * adapter + 2 * contrasted * value + ITERATIONS * pool)
    return Spent(model, others / size(network), first + config.generations * config.pool.draws)


def size(network: GPTNeo) -> int:
    """The parameters of p^(0)."""
    return sum(parameter.numel() for parameter in network.parameters())


COSTS = {"default": default_cost, "published": published_cost}


def baseline_cost(method: str, config: BaselineConfig) -> Spent:
    """Sequences are drawn and trained on, by DPO in pairs; for GRPO p^(0) reads them as well."""
    drawn = config.updates * config.batch_size
    if method.startswith("dpo"):
        paired = config.updates * (config.batch_size // 2 * 2)
        return Spent(drawn + 3 * paired, 0.0, drawn)
    return Spent(drawn + drawn + 3 * drawn, 0.0, drawn)


def baseline(study: Study, method: str, setting: int, network: GPTNeo) -> BaselineConfig:
    """The options of a baseline, which spends as much as the dearer one of METHODS."""
    length = study.config().length
    budget = max(COSTS[name](study.config(name), network).units(length) for name in METHODS)
    rate, strength = study.grid(method)[setting]
    one = BaselineConfig(rate, 0.01, strength, updates=1, batch_size=study.baseline_batch)
    return replace(one, updates=max(1, budget // baseline_cost(method, one).units(length)))
