"""Self-distilled twisted SMC: Algorithm 1 of the paper, from checkpoints to a table.

line 1      psi^(0) <- CTL on p^(0)
for m = 1..M
  line 3    p^(m) <- distil samples of TSMC(p^(m-1), psi^(m-1))
  line 4    psi^(m) <- CTL-m on p^(m), against the same sigma

This is the default. `--method pooled` leaves p^(0) as it is and distils into the twist instead:

for m = 0..M, some rounds each
            pool <- pool + sequences from q, the product of p^(0) and the last psi
            psi^(m) <- the weighted likelihood of the pool under q

R runs, K particles, T tokens.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is quiet while the libraries load

# isort: split
import copy
from pathlib import Path

import torch
from torch import Tensor

from distill.finetune import Student
from distill.self_distill import batches_of, held_out_loss, hold_out, self_distill
from eval.run import processes
from eval.run.command import one_line_errors
from eval.run.evaluate import draw_runs, evaluate_ends, finish_generation
from eval.run.figures import draw_figures
from eval.run.options import RunConfig, read_config
from eval.run.run import Run
from eval.run.setup import Setup, identity, load_setup
from eval.run.table import table
from tinystories import GPTNeo
from tinystories.checkpoint import read_json
from tinystories.fast import keep_freed_memory, pack
from tsmc import Sigma
from tsmc.interfaces import Report
from twist.ctl import learn_twist
from twist.embedding import EmbeddingTwist
from twist.mlp import TwistMLP
from twist.pool import Pool, batches_from_pool, draw_round, learn_twist_from_pool


def self_distilled_tsmc(run: Run, setup: Setup) -> dict:
    """Algorithm 1, each generation measured and saved as it is made; returns the results."""
    results = evaluate_ends(run, setup)
    p, sigma = setup.model, setup.sigma()
    psi = contrastive_twist_learning(run, setup, sigma, 0)  # line 1
    finish_generation(run, setup, 0, p, sigma, psi, results)
    for m in range(1, run.config.generations + 1):  # line 2
        samples = draw_samples(run, sigma, psi, m)
        p = distil(run, p, sigma, samples, m)  # line 3
        sigma = setup.sigma(p)
        psi = contrastive_twist_learning(run, setup, sigma, m)  # line 4
        finish_generation(run, setup, m, p, sigma, psi, results)
    return results


def contrastive_twist_learning(run: Run, setup: Setup, sigma: Sigma, m: int) -> TwistMLP:
    """Lines 1 and 4: psi^(m), learned anew from psi = 1."""
    options = run.config.ctl
    sizes = setup.model.config
    generator = run.generator("ctl", m)
    psi = TwistMLP(sizes.hidden_size, options.hidden_units, sizes.vocab_size, generator)
    optimizer = torch.optim.Adam(psi.parameters(), lr=options.learning_rate)
    processes.share_gradients(psi)

    def learn(report: Report) -> dict[str, Tensor]:
        draw_batch = processes.ctl_batches(sigma, psi, options.batch_size, generator)
        learn_twist(psi, optimizer, draw_batch, options.updates, report)
        return psi.state_dict()

    psi.load_state_dict(run.once("twist learning", m, options.updates, learn))
    return psi


def draw_samples(run: Run, sigma: Sigma, psi: TwistMLP, m: int) -> Tensor:
    """Samples [R, K, T] of TSMC(p^(m-1), psi^(m-1)), without the runs that died."""
    runs = run.config.distill.runs
    population = draw_runs(run, "sampling", m, sigma, pack(psi), run.config.particles, runs)
    return population.alive().samples


def distil(run: Run, p: GPTNeo, sigma: Sigma, samples: Tensor, m: int) -> GPTNeo:
    """Line 3: p^(m) from samples [R, K, T]; a tenth of the runs is held out and only measured."""
    options = run.config.distill
    lora = run.config.lora
    generator = run.generator("distill", m)
    student = Student(p, options.step_size(lora), options.weight_decay, lora, generator)
    trained_on, held_out = hold_out(samples)
    processes.share_gradients(student.network)

    def learn(report: Report) -> dict[str, Tensor]:
        draw_batch = processes.own_rows(batches_of(trained_on, options.batch_size, generator))
        self_distill(student, sigma.model, draw_batch, options.updates, report)
        trained = student.finish()
        after = sigma.model.with_model(pack(trained))
        report(
            held_out_before=held_out_loss(sigma.model, held_out),
            held_out_after=held_out_loss(after, held_out),
        )
        return trained.state_dict()

    model = copy.deepcopy(p)
    model.load_state_dict(run.once("distillation", m, options.updates + 1, learn))
    return model


def pooled_tsmc(run: Run, setup: Setup) -> dict:
    """Twists learned on p^(0) from everything drawn so far; returns the results."""
    results = evaluate_ends(run, setup)
    sigma = setup.sigma()
    pool = Pool()
    psi = None
    for m in range(run.config.generations + 1):
        first = 0 if m == 0 else 1  # round 0 is drawn from p^(0), where there is no twist yet
        for number in range(first, run.config.pool.rounds + 1):
            pool.add(**draw_pool_round(run, sigma, psi, m, number))
            psi = pooled_twist_learning(run, setup, sigma, pool, m, number)
        finish_generation(run, setup, m, setup.model, sigma, psi, results)
    return results


def draw_pool_round(
    run: Run, sigma: Sigma, psi: EmbeddingTwist | None, m: int, number: int
) -> dict[str, Tensor]:
    """Sequences and log weights of one round of generation m."""
    options = run.config.pool
    twist = None if psi is None else pack(psi)
    name = f"round {number}"

    def draw(size: int, generator: torch.Generator) -> dict[str, Tensor]:
        return draw_round(sigma, twist, options.power, size, generator)

    total = options.base_draws if psi is None else options.draws
    return run.draw(name, m, total, run.config.rows, (name, m, ""), draw)


def pooled_twist_learning(
    run: Run, setup: Setup, sigma: Sigma, pool: Pool, m: int, number: int
) -> EmbeddingTwist:
    """The twist after a round of generation m, learned anew from psi = 1."""
    options = run.config.pool
    generator = run.generator("pool", m, number)
    psi = EmbeddingTwist(options.hidden_units, setup.model.output_weight, generator)
    optimizer = torch.optim.Adam(psi.shift.parameters(), lr=options.learning_rate)
    processes.share_gradients(psi)

    def learn(report: Report) -> dict[str, Tensor]:
        sizes = (options.updates, options.batch_size)
        draw_batch = batches_from_pool(sigma.model, pool, options.least_ess, *sizes, generator)
        draw_batch = processes.own_rows(draw_batch)
        learn_twist_from_pool(psi, optimizer, draw_batch, options.updates, report)
        return psi.state_dict()

    phase = f"twist learning {number}"
    psi.load_state_dict(run.once(phase, m, options.updates, learn))
    return psi


def planned_phases(run: Run, setup: Setup) -> int:
    """How many phases the run has, for its display of progress."""
    config = run.config
    ends = 1 if setup.exact is not None or config.eval.target_proposals == 0 else 2
    if config.method == "pooled":
        return ends + 2 + (config.generations + 1) * (2 * config.pool.rounds + 1)
    return ends + 2 + 5 * config.generations


def main(arguments: list[str] | None = None) -> None:
    """Command line to table; bad input ends with one line and exit code 2, Ctrl-C with code 130."""
    with one_line_errors("main.py", "lower --rows, --ctl-batch-size or --distill-batch-size"):
        config, path = read_config(arguments, __doc__.splitlines()[0])
        keep_freed_memory()
        if path is None or not (path / "results.json").exists():
            path = run_job(config, path)
        if processes.rank() == 0:
            results = read_json(path / "results.json")
            print(f"\n{table(results, path / 'results.json')}\n\nEverything is in {path}")


def run_job(config: RunConfig, resumed: Path | None) -> Path:
    """A new run, or the one in the directory `resumed`, to its end; returns its directory."""
    processes.join(config.torch_device())
    setup = load_setup(config)
    algorithm = pooled_tsmc if config.method == "pooled" else self_distilled_tsmc
    with Run(config, resumed, identity(config)) as run:
        run.total = planned_phases(run, setup)
        results = algorithm(run, setup)
        if run.writes:
            draw_figures(results, run.samples, run.path)
        run.finish(results)
        return run.path


if __name__ == "__main__":
    main()
