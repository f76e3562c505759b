"""Self-distilled twisted SMC: Algorithm 1 of the paper, from checkpoints to a table.

line 1      psi^(0) <- CTL on p^(0)
for m = 1..M
  line 3    p^(m) <- distil samples of TSMC(p^(m-1), psi^(m-1))
  line 4    psi^(m) <- CTL-m on p^(m), against the same sigma

With several prompts there is one sigma for each, and they share p^(m) and psi^(m).
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import tinystories
from distill import self_distill
from eval.metrics import evaluate_base, evaluate_generation, evaluate_target, sample_tsmc
from eval.run import processes as ranks
from eval.run.directory import RunDirectory, tables
from eval.run.figures import draw_figures
from eval.run.options import RunConfig, read_config
from eval.run.setup import Ingredients, exact_samples, identity, load_ingredients
from tinystories import GPTNeo, InputError
from tinystories.checkpoint import read_json
from tinystories.memory import keep_freed_memory
from tsmc.sampler import Sigma
from twist import TwistMLP, learn_twist, save_twist


def self_distilled_tsmc(config: RunConfig, given: Ingredients, run: RunDirectory) -> list[list[dict]]:
    """Algorithm 1, each generation evaluated and saved as it is made; returns its rows of the table, one for each prompt."""
    model, sigmas, rows = given.model, given.sigmas(), []
    twist = contrastive_twist_learning(config, sigmas, 0, run)
    rows.append(finish_generation(config, given, model, sigmas, twist, 0, run))
    for m in range(1, config.generations + 1):
        model = distil_samples(config, given, sigmas, twist, m, run)
        sigmas = given.sigmas(model)
        twist = contrastive_twist_learning(config, sigmas, m, run)
        rows.append(finish_generation(config, given, model, sigmas, twist, m, run))
    return rows


def contrastive_twist_learning(config: RunConfig, sigmas: Sequence[Sigma], m: int, run: RunDirectory) -> TwistMLP:
    """Lines 1 and 4: psi^(m), learned anew from psi = 1."""
    generator = config.generator("ctl", m)
    sizes = sigmas[0].model.model.config
    twist = TwistMLP(sizes.hidden_size, config.ctl.hidden_units, sizes.vocab_size, generator)
    learn_twist(sigmas, twist, config.ctl, generator, run.phase("twist learning", m))
    return twist


def distil_samples(
    config: RunConfig, given: Ingredients, sigmas: Sequence[Sigma], twist: TwistMLP, m: int, run: RunDirectory
) -> GPTNeo:
    """Line 3: p^(m) from samples of TSMC(p^(m-1), psi^(m-1)); a tenth of the runs is held out and only measured."""
    samples, held_out = [], []
    for problem, sigma in zip(given.problems, sigmas, strict=True):
        streams, phase = config.streams("sampling", m, problem.name), run.phase("sampling", m, problem.name)
        population = sample_tsmc(config, sigma, twist, config.particles, config.distill.runs, streams, phase).alive()
        some, rest = population.samples().tensor_split([max(1, len(population.log_z) // 10)])  # [R, K, T]
        held_out.append(some.flatten(0, 1))
        samples.append((rest if len(rest) else some).flatten(0, 1))
    models, generator = [sigma.model for sigma in sigmas], config.generator("distill", m)
    return self_distill(models, samples, held_out, config.distill, config.lora, generator, run.phase("distillation", m))


def finish_generation(
    config: RunConfig,
    given: Ingredients,
    model: GPTNeo,
    sigmas: Sequence[Sigma],
    twist: TwistMLP,
    m: int,
    run: RunDirectory,
) -> list[dict]:
    """Save (p^(m), psi^(m)) and measure it after each prompt."""
    if run.writes:
        directory = run.path / f"generation-{m}"
        tinystories.save(directory, model, given.tokenizer)
        save_twist(directory, twist)
    problems = zip(given.problems, sigmas, strict=True)
    return [evaluate_generation(config, problem, given, sigma, twist, m, run) for problem, sigma in problems]


def measured_algorithm(config: RunConfig, given: Ingredients, run: RunDirectory) -> list[dict]:
    """Base, Target and the generations of Algorithm 1, after each prompt."""
    results = []
    for problem in given.problems:
        problem.target = exact_samples(config, problem, run)
        row = {"prompt": problem.prompt, "potential": list(config.potential)}
        row |= {"base": evaluate_base(config, problem, given, run)}
        results.append(row | ({"target": evaluate_target(problem, given, run)} if problem.target else {}))
    generations = self_distilled_tsmc(config, given, run)
    for n, result in enumerate(results):
        result["generations"] = [rows[n] for rows in generations]
    return results


def run_experiment(config: RunConfig, resumed: Path | None) -> Path:
    """Everything from the options to results.json; returns the run's directory."""
    if resumed is not None and (resumed / "results.json").exists():
        return resumed
    ranks.join(config.torch_device())
    given, origin = load_ingredients(config), identity(config)
    run = RunDirectory.create(config, origin) if resumed is None else RunDirectory.resume(resumed, config, origin)
    with run:
        results = measured_algorithm(config, given, run)
        draw_figures(results, run)
        run.finish(results)
    return run.path


def main(arguments: list[str] | None = None) -> None:
    """Command line to table; bad input ends with one line and exit code 2, an interruption with code 130."""
    try:
        config, resumed = read_config(arguments, __doc__.splitlines()[0])
        keep_freed_memory()
        path = run_experiment(config, resumed)
        if ranks.rank() == 0:
            print(f"\n{tables(read_json(path / 'results.json'))}\n\nEverything is in {path}")
        ranks.leave()
    except InputError as error:
        stop(f"error: {error}", 2)
    except KeyboardInterrupt as interruption:
        stop(str(interruption) or "interrupted before anything was written", 130)
    except (MemoryError, RuntimeError) as error:
        if "memory" in str(error).lower():
            stop("error: out of memory; lower --rows, --ctl-batch-size or --distill-batch-size", 2)
        if not ranks.is_lost(error):
            raise
        stop("error: another process of this job has ended; see its message, then continue with --resume", 2)


def stop(message: str, code: int) -> NoReturn:
    """One line on standard error, and the end."""
    print(f"main.py: {message}", file=sys.stderr, flush=True)
    ranks.leave()
    sys.exit(code)


if __name__ == "__main__":
    main()
