"""Self-distilled twisted SMC: Algorithm 1 of the paper, from checkpoints to a table.

    line 1      psi^(0) <- CTL on p^(0)
    line 2      for m = 1..M
    line 3          p^(m)   <- distil samples of TSMC(p^(m-1), psi^(m-1))     eq. 7
    line 4          psi^(m) <- contrastive twist learning (CTL) on p^(m)      eq. 6

The target never changes: sigma(s_{1:T}) is proportional to p^(0)(s_{1:T}) phi(s_{1:T}) (eq. 2), and
p^(m) sees it through phi^(m) = p^(0) phi / p^(m) (eq. 8). This is the loop of docs/tiny.py, with
networks in place of tables. `distill/paper.py` has the paper's lines 1, 3 and 4, and
`distill/pooled.py` ours (`--learner pooled`). A generation is measured and kept once it is learned.
"""

from eval.command import one_line_errors
from eval.evaluate import evaluate, evaluate_ends
from eval.figures import draw_figures
from eval.options import LEARNERS, Config, read_config
from eval.run import Run
from eval.table import closing
from eval.world import World, load_world
from tsmc import streams


def self_distilled_tsmc(config: Config, world: World, run: Run) -> dict:
    """Algorithm 1, from the beginning or behind the last generation that the run has kept."""
    source = streams.Streams(config.run.seed, config.run.torch_device())
    learner = LEARNERS[config.run.learner](world.base, world.potential, config.learner, source)
    # The rows Base and Target come first: they tell early whether phi is too rare to learn from.
    evaluate_ends(run, world, learner)
    done = run.generations()
    if done > 0:
        pair = run.restore(done - 1, learner)
    for m in range(done, config.run.generations + 1):  # line 2
        if m == 0:
            pair = learner.first_twist()  # line 1: (p^(0), psi^(0))
        else:
            model = learner.distil(pair, m)  # line 3: p^(m)
            pair = learner.learn_twist(model, m)  # line 4: (p^(m), psi^(m))
        streams.align(pair.modules(world.base).values())
        row, samples = evaluate(run, world, learner, pair, m)  # the table's row, and its texts
        run.keep(m, row, samples, learner, pair)  # from here on --resume goes on behind it
    return run.finish()  # all rows


def main(arguments: list[str] | None = None) -> None:
    """Command line to table; bad input ends with one line and exit code 2, Ctrl-C with code 130."""
    with one_line_errors("main.py"):
        config, resumed = read_config(arguments, __doc__.splitlines()[0])
        streams.join(config.run.torch_device())
        run = Run(config, resumed)
        world = load_world(config.run, resumed)
        with run:
            results = self_distilled_tsmc(config, world, run)
            if streams.rank() == 0:
                draw_figures(results, run.path)
                print(closing(results, run.path))


if __name__ == "__main__":
    main()
