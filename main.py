"""Self-distilled twisted SMC: Algorithm 1 of the paper, from checkpoints to a table.

line 1      psi^(0) <- CTL on p^(0)
for m = 1..M
  line 3    p^(m) <- distil samples of TSMC(p^(m-1), psi^(m-1))
  line 4    psi^(m) <- CTL-m on p^(m), against the same sigma
"""

import sys
from pathlib import Path

import tinystories
from config import RunConfig, read_config
from distill import self_distill
from eval.evaluate import evaluate_base, evaluate_generation, evaluate_target, sample_tsmc
from eval.figures import draw_figures
from eval.ingredients import Ingredients, exact_samples, load_ingredients
from eval.run import RunDirectory, table
from tinystories import Conditional, InputError
from tinystories.checkpoint import write_json
from tinystories.memory import keep_freed_memory
from tsmc.sampler import LogPotential
from twist import TwistMLP, base_potential, effective_potential, learn_twist, save_twist


def self_distilled_tsmc(config: RunConfig, given: Ingredients, run: RunDirectory) -> list[dict]:
    """Algorithm 1, each generation evaluated and saved as it is made; returns the table's rows."""
    model, log_potential, rows = given.base, base_potential(given.potential), []
    twist = contrastive_twist_learning(config, model, log_potential, 0, run)
    rows.append(finish_generation(config, given, model, twist, log_potential, 0, run))
    for m in range(1, config.generations + 1):
        model = distil_samples(config, model, twist, log_potential, m, run)
        log_potential = effective_potential(given.potential, given.base)
        twist = contrastive_twist_learning(config, model, log_potential, m, run)
        rows.append(finish_generation(config, given, model, twist, log_potential, m, run))
    return rows


def contrastive_twist_learning(
    config: RunConfig, model: Conditional, log_potential: LogPotential, m: int, run: RunDirectory
) -> TwistMLP:
    """Lines 1 and 4: psi^(m), learned anew from psi = 1."""
    generator = config.generator("ctl", m)
    sizes = model.model.config
    twist = TwistMLP(sizes.hidden_size, config.ctl.hidden_units, sizes.vocab_size, generator)
    with run.progress("twist learning", m, config.ctl.updates) as report:
        learn_twist(model, twist, log_potential, config.ctl, generator, report)
    return twist


def distil_samples(
    config: RunConfig, model: Conditional, twist: TwistMLP, log_potential: LogPotential, m: int, run: RunDirectory
) -> Conditional:
    """Line 3: p^(m) from samples of TSMC(p^(m-1), psi^(m-1)); a tenth of the runs is held out and only measured."""
    generator = config.generator("distill", m)
    with run.progress("sampling", m, config.distill.runs) as report:
        sampling = (config.particles, config.distill.runs, generator, config.resampling, config.ess_threshold)
        samples = sample_tsmc(model, twist, log_potential, *sampling, report).samples()  # [R, K, T]
    held_out = max(1, config.distill.runs // 10)
    parts = samples[held_out:].flatten(0, 1), samples[:held_out].flatten(0, 1)
    with run.progress("distillation", m, config.distill.updates) as report:
        return self_distill(model, *parts, config.distill, config.lora, generator, report)


def finish_generation(
    config: RunConfig,
    given: Ingredients,
    model: Conditional,
    twist: TwistMLP,
    log_potential: LogPotential,
    m: int,
    run: RunDirectory,
) -> dict:
    """Save (p^(m), psi^(m)) and measure it."""
    directory = run.path / f"generation-{m}"
    tinystories.save(directory, model.model, given.potential.tokenizer)
    save_twist(directory, twist)
    return evaluate_generation(config, given, model, twist, log_potential, m, run)


def main(arguments: list[str] | None = None) -> None:
    """Command line to table; bad input ends with one line and exit code 2."""
    try:
        config = read_config(arguments, __doc__.splitlines()[0])
        keep_freed_memory()
        given = load_ingredients(config)
        run = RunDirectory(Path(config.out)) if config.out else RunDirectory.numbered(Path("runs"), config.preset)
        run.write_config(config)
        given.target = exact_samples(config, given, run)
        results = {"base": evaluate_base(config, given, run), "target": evaluate_target(given, run)}
        results["generations"] = self_distilled_tsmc(config, given, run)
        write_json(run.path / "results.json", results)
        draw_figures(results, run)
    except InputError as error:
        print(f"main.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if "memory" not in str(error).lower():
            raise
        print(
            "main.py: error: out of memory; lower --particles, --ctl-batch-size or --distill-batch-size",
            file=sys.stderr,
        )
        sys.exit(2)
    print(f"\n{table(results)}\n\nEverything is in {run.path}")


if __name__ == "__main__":
    main()
