"""Self-distilled twisted SMC: Algorithm 1 of the paper, from checkpoints to a table.

    line 1      psi^(0) <- CTL on p^(0)
    line 2      for m = 1..M
    line 3          p^(m)   <- distil samples of TSMC(p^(m-1), psi^(m-1))     eq. 7
    line 4          psi^(m) <- contrastive twist learning (CTL) on p^(m)      eq. 6

The target never changes: sigma(s_{1:T}) is proportional to p^(0)(s_{1:T}) phi(s_{1:T}) (eq. 2), and
p^(m) sees it through phi^(m) = p^(0) phi / p^(m) (eq. 8). This is the loop of docs/tiny.py, with
networks in place of tables. `distill/paper.py` has the paper's lines 1, 3 and 4, and
`distill/pooled/` ours (`--learner pooled`). A generation is measured and kept once it is learned.
"""

from eval.command import one_line_errors
from eval.evaluate import evaluate, evaluate_ends
from eval.figures import draw_figures
from eval.job import Job
from eval.options import LEARNERS, Options, read_options
from eval.table import closing
from eval.world import World, load_world
from tsmc import Streams, processes


def self_distilled_tsmc(options: Options, world: World, job: Job) -> dict:
    """Algorithm 1, from the beginning or behind the last generation that the job has kept."""
    streams = Streams(options.seed, options.torch_device())
    learner = LEARNERS[options.learner](world.base, world.potential, options.learning, streams)
    # The rows Base and Target come first: they tell early whether phi is too rare to learn from.
    evaluate_ends(job, world, learner)
    done = job.num_done()
    if done > 0:
        pair = job.restore(done - 1, learner)
    for m in range(done, options.generations + 1):  # line 2
        if m == 0:
            pair = learner.first_twist()  # line 1: (p^(0), psi^(0))
        else:
            model = learner.distil(pair, m)  # line 3: p^(m)
            pair = learner.learn_twist(model, m)  # line 4: (p^(m), psi^(m))
        # With torchrun every process goes on with the networks of process 0.
        processes.align(pair.modules(world.base).values())
        row, samples = evaluate(job, world, learner, pair, m)  # the table's row, and its texts
        job.keep(m, row, samples, learner, pair)  # from here on --resume goes on behind it
    return job.finish()  # all rows


def main(arguments: list[str] | None = None) -> None:
    """Command line to table; bad input ends with one line and exit code 2, Ctrl-C with code 130."""
    with one_line_errors("main.py"):
        options, resumed_folder = read_options(arguments, __doc__.splitlines()[0])
        processes.join(options.torch_device())
        job = Job(options, resumed_folder)
        world = load_world(options, resumed_folder)
        with job:  # locked and written once nothing can be refused any more
            results = self_distilled_tsmc(options, world, job)
            if processes.rank() == 0:
                draw_figures(results, job.path)
                print(closing(results, job.path))


if __name__ == "__main__":
    main()
