"""Self-distilled twisted SMC: Algorithm 1 of the paper, from checkpoints to a table.

line 1      psi^(0) <- CTL on p^(0)
for m = 1..M
  line 3    p^(m) <- distil samples of TSMC(p^(m-1), psi^(m-1))
  line 4    psi^(m) <- CTL-m on p^(m), against the same sigma

By default all lines learn from a pool of every sequence drawn so far, line 1 climbs to sigma in
rounds of draws, p^(m) is an adapter of p^(0), and psi^(m) is the value of a prefix.
`--as-published` learns from the last samples alone, trains all of p^(m), and psi^(m) is an MLP that
CTL learns from batches of its own; `--no-pooling`, `--student` and the like change some of these.
R runs, K particles, T tokens.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is quiet while the libraries load

# isort: split
import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from distill.finetune import Student
from distill.self_distill import Batch, adapter_loss, batches_of, model_loss, self_distill
from eval.run import processes
from eval.run.command import one_line_errors, say
from eval.run.evaluate import draw_runs, evaluate_ends, finish_generation
from eval.run.figures import draw_figures
from eval.run.options import CLASSIFIED, RunConfig, read_config
from eval.run.run import Run
from eval.run.setup import Setup, identity, load_setup
from eval.run.table import table
from tinystories import Conditional
from tinystories.checkpoint import read_json
from tinystories.fast import keep_freed_memory, pack
from tsmc import Sigma
from tsmc.interfaces import Report
from twist.adapter import Adapter
from twist.ctl import batches_from_proposal, learn_twist
from twist.mlp import TwistMLP
from twist.pool import Pool, Round, draw_round
from twist.surrogate import fit_surrogate
from twist.value import ValueTwist, batches_of_values, learn_value


def self_distilled_tsmc(run: Run, setup: Setup) -> dict:
    """Algorithm 1, each generation measured and saved as it is made; returns the results."""
    results = evaluate_ends(run, setup)
    p = setup.model
    samples = first_samples(run, setup)
    psi = learn_psi(run, setup, p, samples, 0)  # line 1
    finish_generation(run, setup, 0, p, psi, results)
    for m in range(1, run.config.generations + 1):  # line 2
        samples = draw_samples(run, setup, p, psi, samples, m)
        p = distil(run, setup, p, samples, m)  # line 3
        psi = learn_psi(run, setup, p, samples, m)  # line 4
        finish_generation(run, setup, m, p, psi, results)
    return results


def first_samples(run: Run, setup: Setup) -> Pool:
    """What line 1 learns from: rounds of draws, each from a proposal that is nearer to sigma.

    The first is p^(0). Between rounds an adapter learns p^(0) phi^b from all draws so far; it
    proposes the next round. As long as no draw has phi > 0, that is p^(0). Without the pool: none.
    """
    options = run.config.pool
    sizes = options.first_sizes() if run.config.pooling else []
    samples, adapter = Pool(), None
    for r, count in enumerate(sizes, 1):
        add_round(run, setup, adapter or setup.model, samples, 0, count, r)
        if r < len(sizes) and samples.log_weights().max() > -torch.inf:
            tempered = samples.tempered(options.first_ess)
            phase, updates = f"ladder {r}", options.first_updates
            adapter = fit_adapter(run, setup, phase, tempered, 0, updates, adapter)
    return samples


def draw_samples(
    run: Run, setup: Setup, p: nn.Module, psi: nn.Module, samples: Pool, m: int
) -> Pool:
    """What generation m >= 1 learns from: the pool with a further round, drawn from q^(m-1).

    Without the pool: the samples of TSMC(p^(m-1), psi^(m-1)) alone.
    """
    if not run.config.pooling:
        return last_samples(run, setup.sigma(p, psi), psi, m)
    add_round(run, setup, psi.adapter or p, samples, m, run.config.pool.draws, None)
    return samples


def add_round(
    run: Run, setup: Setup, q: nn.Module, samples: Pool, m: int, count: int, r: int | None
) -> None:
    """Add round r of generation m, draws of q, and fit the surrogate anew. r is None if alone.

    q is a GPT-Neo or an adapter.
    """
    proposal = setup.proposal(q)

    def draw(size: int, generator: torch.Generator) -> dict[str, Tensor]:
        return vars(draw_round(*proposal, setup.potential, size, generator))

    number = "" if r is None else f" {r}"
    phase = f"sampling{number}"
    drawn = run.draw(phase, m, count, run.config.rows, (phase, m), draw)
    samples.rounds.append(Round(**drawn))
    if run.config.surrogate:
        samples.scores = learn_scores(run, setup, f"surrogate{number}", samples, m)


def last_samples(run: Run, sigma: Sigma, psi: nn.Module, m: int) -> Pool:
    """The samples of R TSMC runs at equal weights, without the runs that died."""
    runs = run.config.distill.runs
    population = draw_runs(run, "sampling", m, sigma, pack(psi), run.config.particles, runs)
    tokens = population.alive().samples.flatten(0, 1)  # [N, T]
    return Pool([Round(tokens, torch.zeros(len(tokens), device=tokens.device))])


def learn_scores(run: Run, setup: Setup, phase: str, samples: Pool, m: int) -> Tensor:
    """The scores g [V] of the surrogate of phi."""
    reads_classifier = CLASSIFIED & set(run.config.potential)
    scale = max(run.config.beta, 1.0) if reads_classifier else 1.0
    vocab_size = setup.model.config.vocab_size

    def fit(report: Report) -> dict[str, Tensor]:
        scores, loss = fit_surrogate(samples.tokens(), samples.log_phi(), scale, vocab_size)
        report(loss=loss)
        return {"scores": scores}

    return run.once(phase, m, 1, fit)["scores"]


def learn_psi(run: Run, setup: Setup, p: nn.Module, samples: Pool, m: int) -> nn.Module:
    """Lines 1 and 4: psi^(m), the value of a prefix, learned against the same sigma for every m.

    psi^(0) has an adapter too, which makes its proposal q.
    """
    config = run.config
    if not config.pooling:
        return contrastive_twist_learning(run, setup, p, m)
    weights = samples.weights(config.pool.least_ess)
    alive = (weights > 0).sum().item()
    if alive < config.pool.least_ess * len(weights):
        run.say(f"only {alive} of {len(weights)} draws have phi > 0; all of them weigh the same")
    adapter = None
    if m == 0:
        updates = config.distill.updates
        adapter = fit_adapter(run, setup, "twist learning", samples, m, updates, None)
    memory = samples.scores if config.memory else None
    options = config.value
    generator = config.generator("value", m)
    sizes = setup.model.config
    widths = (sizes.hidden_size, options.hidden_units, sizes.vocab_size)
    psi = ValueTwist(*widths, generator, memory, adapter)

    def learn(report: Report) -> dict[str, Tensor]:
        q = setup.conditional(p if adapter is None else adapter, memory)
        counts = (options.negatives, options.batch_size, options.updates)
        batches = batches_of_values(q, samples, weights, *counts, generator)
        optimizer = torch.optim.Adam(psi.network.parameters(), lr=options.learning_rate)
        learn_value(psi, optimizer, *batches, options.updates, report)
        return psi.network.state_dict()

    if config.learn_value:
        psi.network.load_state_dict(run.once("value learning", m, options.updates, learn))
    return psi


def contrastive_twist_learning(run: Run, setup: Setup, p: nn.Module, m: int) -> TwistMLP:
    """Lines 1 and 4 without the pool: psi^(m) by CTL on batches of its own, from psi = 1."""
    options = run.config.ctl
    sizes = setup.model.config
    generator = run.config.generator("ctl", m)
    psi = TwistMLP(sizes.hidden_size, options.hidden_units, sizes.vocab_size, generator)
    optimizer = torch.optim.Adam(psi.parameters(), lr=options.learning_rate)
    processes.share_gradients(psi)

    def learn(report: Report) -> dict[str, Tensor]:
        sigma = setup.sigma(p, psi)
        size = options.batch_size
        own = processes.share(size)
        draw_batch = batches_from_proposal(sigma, psi, size, generator, own, processes.all_rows)
        learn_twist(psi, optimizer, draw_batch, options.updates, report)
        return psi.state_dict()

    psi.load_state_dict(run.once("twist learning", m, options.updates, learn))
    return psi


def distil(run: Run, setup: Setup, p: nn.Module, samples: Pool, m: int) -> nn.Module:
    """Line 3: p^(m), an adapter of p^(0), or p^(m-1) = p with all parameters or LoRA fine-tuned.

    All of them minimise the weighted eq. 7.
    """
    options = run.config.distill
    if run.config.student == "adapter":
        return fit_adapter(run, setup, "distillation", samples, m, options.updates, None)
    is_lora = run.config.student == "lora"
    generator = run.config.generator("distill", m)
    step_size = options.lora_learning_rate if is_lora else options.learning_rate
    student = Student(p, step_size, options.weight_decay, is_lora, generator)
    processes.share_gradients(student.network)

    def learn(report: Report) -> dict[str, Tensor]:
        draw_batch = sample_batches(run, samples, options.updates, generator)
        loss = partial(model_loss, student.after(setup.base))
        self_distill(loss, student.optimizer, draw_batch, options.updates, report)
        return student.finish().state_dict()

    model = copy.deepcopy(p)
    model.load_state_dict(run.once("distillation", m, options.updates, learn))
    return model


def fit_adapter(
    run: Run, setup: Setup, phase: str, samples: Pool, m: int, updates: int, start: Adapter | None
) -> Adapter:
    """An adapter of p^(0) that minimises the weighted eq. 7, from p^(0) or the MLP of `start`."""
    options = run.config.distill
    generator = run.config.generator(phase, m)
    has_memory = samples.scores is not None and run.config.memory
    adapter = Adapter(setup.model, samples.scores, has_memory, options.hidden_units, generator)
    if start is not None:
        adapter.shift.load_state_dict(start.shift.state_dict())
    trained = adapter.shift.parameters()
    optimizer = torch.optim.Adam(trained, lr=options.adapter_learning_rate)
    processes.share_gradients(adapter)

    def learn(report: Report) -> dict[str, Tensor]:
        base = setup.conditional(setup.model, adapter.memory)
        draw_batch = sample_batches(run, samples, updates, generator, base)
        self_distill(partial(adapter_loss, adapter), optimizer, draw_batch, updates, report)
        return adapter.shift.state_dict()

    adapter.shift.load_state_dict(run.once(phase, m, updates, learn))
    return adapter


def sample_batches(
    run: Run, samples: Pool, updates: int, source: torch.Generator, base: Conditional | None = None
) -> Callable[[int], Batch]:
    """Batches of weighted samples, with their states in `base` where it is given."""
    weights = samples.weights(run.config.pool.least_ess)
    batch_size = run.config.distill.batch_size
    own = processes.share(batch_size)
    return batches_of(samples.tokens(), weights, batch_size, updates, source, base, own)


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
    if processes.rank() == 0 and not config.quiet:
        say("loading the networks")
    setup = load_setup(config)
    with Run(config, resumed, identity(config)) as run:
        results = self_distilled_tsmc(run, setup)
        if run.writes:
            run.say("drawing the figures", is_progress=True)
            draw_figures(results, run.records, run.samples, run.path / "figures")
        run.finish(results)
        return run.path


if __name__ == "__main__":
    main()
