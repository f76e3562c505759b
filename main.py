"""Self-distilled twisted SMC: Algorithm 1 of the paper, from checkpoints to a table.

line 1      psi^(0) <- CTL on p^(0)
for m = 1..M
  line 3    p^(m) <- distil samples of TSMC(p^(m-1), psi^(m-1))
  line 4    psi^(m) <- CTL-m on p^(m), against the same sigma

This is the default. `--method pooled` leaves p^(0) as it is and distils into the twist instead:

for m = 0..M, some rounds each
            pool <- pool + sequences from q, the product of p^(0) and the last psi
            psi^(m) <- the weighted likelihood of the pool under q

With several prompts there is one sigma for each, and they share p^(m) and psi^(m). R runs, K particles, T tokens.
"""

from collections.abc import Sequence

import tinystories.interrupts  # noqa: F401 (before torch, so that Ctrl-C is quiet while it loads)

# isort: split
import torch
from torch import Tensor

from distill import Student, batches_of, held_out_loss, hold_out, self_distill
from eval.run import processes
from eval.run.command import one_line_errors
from eval.run.directory import is_finished
from eval.run.experiment import Experiment
from eval.run.options import read_config
from eval.run.table import tables
from tinystories import GPTNeo
from tinystories.checkpoint import read_json
from tinystories.fast import accelerate, keep_freed_memory
from tsmc import Sigma, sample_runs
from twist import EmbeddingTwist, Pool, TwistMLP, batches_from_pools, draw_round, learn_twist, learn_twist_from_pools


def self_distilled_tsmc(run: Experiment, generations: int) -> list[dict]:
    """Algorithm 1, each generation measured and saved as it is made; returns the rows of the table after each prompt."""
    results = run.evaluate_ends()
    p, sigmas = run.setup.model, run.setup.sigmas()
    psi = contrastive_twist_learning(run, sigmas, 0)  # line 1
    run.finish_generation(0, p, sigmas, psi, results)
    for m in range(1, generations + 1):  # line 2
        samples = draw_samples(run, sigmas, psi, m)
        p = distil(run, p, sigmas, samples, m)  # line 3
        sigmas = run.setup.sigmas(p)
        psi = contrastive_twist_learning(run, sigmas, m)  # line 4
        run.finish_generation(m, p, sigmas, psi, results)
    return results


def pooled_tsmc(run: Experiment, generations: int) -> list[dict]:
    """Twists learned on p^(0) from everything drawn so far; returns the rows of the table after each prompt."""
    results = run.evaluate_ends()
    p, sigmas, psi = run.setup.model, run.setup.sigmas(), None
    pools = [Pool() for _ in sigmas]
    for m in range(generations + 1):
        first = 0 if m == 0 else 1  # round 0 is drawn from p^(0), where there is no twist yet
        for number in range(first, run.config.pool.rounds + 1):
            for problem, sigma, pool in zip(run.setup.problems, sigmas, pools, strict=True):
                pool.add(*draw_round(sigma, psi, run.config.pool.power, run.round_chunks(m, number, problem)))
            psi = pooled_twist_learning(run, sigmas, pools, m, number)
        run.finish_generation(m, p, sigmas, psi, results)
    return results


def pooled_twist_learning(
    run: Experiment, sigmas: Sequence[Sigma], pools: Sequence[Pool], m: int, number: int
) -> EmbeddingTwist:
    """The twist after a round of generation m, learned anew from psi = 1."""
    options, generator = run.config.pool, run.generator("pool", m, number)
    psi = accelerate(EmbeddingTwist(options.hidden_units, run.setup.model.output_weight, generator))
    optimizer = torch.optim.Adam(psi.shift.parameters(), lr=options.learning_rate)
    models, sizes = [sigma.model for sigma in sigmas], (options.updates, options.batch_size)
    draw_batch = batches_from_pools(models, pools, options.least_ess, *sizes, generator)
    steps = run.steps(f"twist learning {number}", m, options.updates, twist=psi, optimizer=optimizer)
    learn_twist_from_pools(psi, optimizer, processes.own_rows(draw_batch), steps)
    return psi


def contrastive_twist_learning(run: Experiment, sigmas: Sequence[Sigma], m: int) -> TwistMLP:
    """Lines 1 and 4: psi^(m), learned anew from psi = 1."""
    options, generator = run.config.ctl, run.generator("ctl", m)
    sizes = run.setup.model.config
    psi = accelerate(TwistMLP(sizes.hidden_size, options.hidden_units, sizes.vocab_size, generator))
    optimizer = torch.optim.Adam(psi.parameters(), lr=options.learning_rate)
    steps = run.steps("twist learning", m, options.updates, twist=psi, optimizer=optimizer, generator=generator)
    learn_twist(psi, optimizer, processes.ctl_batches(sigmas, psi, options.batch_size, generator), steps)
    return psi


def draw_samples(run: Experiment, sigmas: Sequence[Sigma], psi: TwistMLP, m: int) -> list[Tensor]:
    """Samples [R, K, T] of TSMC(p^(m-1), psi^(m-1)) after each prompt, without the runs that died."""
    samples = []
    for problem, sigma in zip(run.setup.problems, sigmas, strict=True):
        chunks = run.run_chunks("sampling", m, problem, run.config.particles, run.config.distill.runs)
        samples.append(sample_runs(sigma, psi, run.config.particles, chunks, **run.resampling()).alive().samples)
    return samples


def distil(run: Experiment, p: GPTNeo, sigmas: Sequence[Sigma], samples: Sequence[Tensor], m: int) -> GPTNeo:
    """Line 3: p^(m) from samples [R, K, T] after each prompt; a tenth of the runs is held out and only measured."""
    options, generator, lora = run.config.distill, run.generator("distill", m), run.config.lora
    trained_on, held_out = hold_out(samples)
    student = Student(p, options.step_size(lora), options.weight_decay, lora, generator)
    state = {"student": student.network, "optimizer": student.optimizer, "generator": generator}
    draw_batch = processes.own_rows(batches_of(trained_on, options.batch_size, generator))
    prompts = [sigma.model for sigma in sigmas]
    self_distill(student, prompts, draw_batch, run.steps("distillation", m, options.updates, **state))
    model = student.finish("distillation")
    students = [student.after(base) for base in prompts]
    run.note_held_out(m, held_out_loss(prompts, held_out), held_out_loss(students, held_out))
    return model


def main(arguments: list[str] | None = None) -> None:
    """Command line to table; bad input ends with one line and exit code 2, an interruption with code 130."""
    with one_line_errors("main.py", "lower --rows, --ctl-batch-size or --distill-batch-size"):
        config, path = read_config(arguments, __doc__.splitlines()[0])
        keep_freed_memory()
        if path is None or not is_finished(path, config):
            with Experiment(config, path) as run:
                algorithm = pooled_tsmc if config.method == "pooled" else self_distilled_tsmc
                run.finish(algorithm(run, config.generations))
                path = run.directory.path
        if processes.rank() == 0:
            print(f"\n{tables(read_json(path / 'results.json'))}\n\nEverything is in {path}")
        processes.leave()


if __name__ == "__main__":
    main()
