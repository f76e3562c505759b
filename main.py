"""Self-distilled twisted SMC: Algorithm 1 of the paper, from checkpoints to a table.

    line 1      psi^(0) <- CTL on p^(0)
    line 2      for m = 1..M
    line 3          p^(m)   <- distil samples of TSMC(p^(m-1), psi^(m-1))     eq. 7
    line 4          psi^(m) <- contrastive twist learning (CTL) on p^(m)      eq. 6

The target never changes: sigma(s_{1:T}) is proportional to p^(0)(s_{1:T}) phi(s_{1:T}) (eq. 2), and
p^(m) sees it through phi^(m) = p^(0) phi / p^(m) (eq. 8). `distill/published.py` has the paper's
lines 1, 3 and 4, the default; `distill/pooled.py` has ours (`--learner pooled`). Each generation is
measured and saved as soon as it is learned.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is quiet while the libraries load
    import eval  # noqa: F401 (it prepares the environment of a command, before torch is loaded)

# isort: split
from pathlib import Path

from distill.pooled import Pooled
from distill.published import Published
from eval.figures import draw_figures
from eval.run import processes
from eval.run.command import one_line_errors, say
from eval.run.evaluate import evaluate_ends, finish_generation, plan
from eval.run.options import RunConfig, read_config
from eval.run.run import Run
from eval.run.setup import Setup, identity, load_setup
from eval.table import closing, table
from tinystories.checkpoint import read_json


def self_distilled_tsmc(run: Run, setup: Setup, config: RunConfig) -> dict:
    """Algorithm 1; returns the rows of its table."""
    learner = make_learner(run, setup, config)
    run.progress.plan = plan(learner, setup, config)
    # Base and Target come first: they tell early whether phi is too rare to learn from.
    results = evaluate_ends(run, setup, config)
    pair = learner.line_1()  # (p^(0), psi^(0))
    finish_generation(run, setup, config, 0, pair, results)
    for m in range(1, config.generations + 1):  # line 2
        model = learner.line_3(pair, m)  # p^(m)
        pair = learner.line_4(model, m)  # (p^(m), psi^(m))
        finish_generation(run, setup, config, m, pair, results)
    return results | {"scores": learner.scores(config.generations)}


def make_learner(run: Run, setup: Setup, config: RunConfig) -> Published | Pooled:
    """The learner that the options name, for p^(0) and phi; `run` computes its phases."""
    if config.learner == "published":
        return Published(setup.base, setup.potential, config, run)
    # phi = p(toxic | s)^beta is nearly 0 for every text; its beta-th root gives labels that differ.
    scale = max(config.beta, 1.0) if config.has_classifier() else 1.0
    return Pooled(setup.base, setup.potential, config, run, scale)


def run_job(config: RunConfig, resumed: Path | None) -> Path:
    """A new run, or the one in the directory `resumed`, to its end; returns its directory."""
    processes.join(config.torch_device())
    if processes.rank() == 0 and not config.quiet:
        say("loading the networks")
    setup = load_setup(config)
    with Run(config, resumed, identity(config)) as run:
        results = self_distilled_tsmc(run, setup, config)
        if run.writes:
            run.say("drawing the figures", is_progress=True)
            draw_figures(results, run.records, run.samples, run.path / "figures")
        run.finish(results)
        return run.path


def main(arguments: list[str] | None = None) -> None:
    """Command line to table; bad input ends with one line and exit code 2, Ctrl-C with code 130."""
    with one_line_errors("main.py", "lower --rows, --ctl-batch-size or --distill-batch-size"):
        config, path = read_config(arguments, __doc__.splitlines()[0])
        if path is None or not (path / "results.json").exists():
            path = run_job(config, path)
        if processes.rank() == 0:
            results = read_json(path / "results.json")
            print(f"\n{table(results, path / 'results.json')}\n\n{closing(results, path)}")


if __name__ == "__main__":
    main()
