"""Self-distilled twisted SMC: Algorithm 1 of the paper, from checkpoints to a table.

    line 1      psi^(0) <- CTL on p^(0)
    line 2      for m = 1..M
    line 3          p^(m)   <- distil samples of TSMC(p^(m-1), psi^(m-1))     eq. 7
    line 4          psi^(m) <- contrastive twist learning (CTL) on p^(m)      eq. 6

The target never changes: sigma(s_{1:T}) is proportional to p^(0)(s_{1:T}) phi(s_{1:T}) (eq. 2), and
p^(m) sees it through phi^(m) = p^(0) phi / p^(m) (eq. 8). docs/tiny.py is the same with tables.
"""

import os
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin starve a busy machine
from distill.paper import Paper
from eval.evaluate import end_rows, generation_row, table
from eval.job import Job, command
from eval.options import Options, read_options
from eval.world import World, load_world
from tsmc.streams import Streams, join_processes

LEARNERS = {  # by the name that --learner gives; those of beyond/ are not the paper's
    "paper": "distill.paper:Paper",
    "dpo": "distill.policy:DPO",
    "grpo": "distill.policy:GRPO",
    "rl": "beyond.rl:RL",
    "dpg": "beyond.dpg:DPG",
    "pooled": "beyond.pooled:Pooled",
}


def self_distilled_tsmc(options: Options, world: World, job: Job, learner: Paper) -> dict[str, Any]:
    """Algorithm 1, from the beginning or behind the last generation that the job has kept."""
    # The rows Base and Target come first: they tell early whether phi is too rare to learn from.
    if not job.file(None).exists():
        job.keep_ends(end_rows(options, world, learner), world)
    done = job.num_done()
    pair = job.restore(done - 1, learner) if done > 0 else None
    for m in range(done, options.generations + 1):  # line 2
        model = learner.distil(pair, m) if m > 0 else world.base  # line 3: p^(m)
        pair = learner.learn_twist(model, m)  # lines 1 and 4: (p^(m), psi^(m))
        row = generation_row(options, world, learner, pair, m)
        pair = job.keep(m, row, pair, learner)  # from here on --resume goes on behind it
    return job.finish()  # all rows


def main(arguments: list[str] | None = None) -> None:
    """Command line to table; bad input ends with one line and exit code 2, Ctrl-C with code 130."""
    with command("main.py") as remedies:
        options, learner_class, resumed = read_options(arguments, LEARNERS, __doc__)
        join_processes(options.torch_device())
        world = load_world(options, resumed)
        job = Job(options, resumed)
        remedies.append(f"continue with --resume {job.path}")
        streams = Streams(options.seed, options.torch_device())
        learner = learner_class(world.base, world.potential, options, streams)
        results = self_distilled_tsmc(options, world, job, learner)
        if job.is_writer:
            print(table(results), *results["generations"][-1]["examples"], sep="\n")
            print(f"Everything is in {job.path}; more texts: python -m eval.sample {job.path}")


if __name__ == "__main__":
    main()
