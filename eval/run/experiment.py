"""A run of `main.py` as its algorithm sees it: the parts, the random streams, the phases, and where results go."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from eval.metrics import mean_scores, score
from eval.run import processes
from eval.run.command import say
from eval.run.directory import RunDirectory
from eval.run.evaluate import evaluate_base, evaluate_generation, evaluate_target
from eval.run.options import RunConfig, by_flag
from eval.run.plan import Costs, estimate, measured_costs, memory_needed, planned_work
from eval.run.saved import save_generation
from eval.run.setup import Problem, identity, load_setup, sigma_key
from eval.run.state import State
from eval.run.steps import Progress, RunChunks, RunSteps
from eval.run.target import save_target
from tinystories.errors import InputError
from tinystories.gpt_neo import GPTNeo
from tsmc import SCHEMES, ExactSamples, Sigma, rejection_sample, sample_model, sample_runs
from tsmc.interfaces import LanguageModel


class Experiment:
    """Options, networks and directory of one run. Inside its `with` block the directory is locked and Ctrl-C saves first."""

    def __init__(self, config: RunConfig, resumed: Path | None):
        """A new run, or the one in the directory `resumed`; InputError names the option or file that is at fault."""
        processes.join(config.torch_device())
        processes.compare(by_flag(config) | {"--resume": str(resumed)})
        if not config.quiet:
            self.say(f"loading the networks of the preset {config.preset}")
        self.config, self.setup = config, load_setup(config)
        origin = identity(config)
        processes.compare(origin)
        create = resumed is None
        self.directory = RunDirectory.create(config, origin) if create else RunDirectory.resume(resumed, config, origin)

    def plan(self) -> list[float]:
        """The work of every phase; at the paper's size it is measured, in seconds, and the sum said before anything begins."""
        config, have_target = self.config, [problem.exact is not None for problem in self.setup.problems]
        if config.preset != "paper" or config.quiet:
            return planned_work(config, have_target, Costs())
        self.say("measuring a few steps, to say how long it will take")
        plan = planned_work(config, have_target, measured_costs(config, self.setup))
        self.say(estimate(plan, memory_needed(config, self.setup), processes.count()))
        return plan

    def __enter__(self) -> "Experiment":
        self.directory.plan = self.plan()
        self.directory.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.directory.__exit__(*error)

    def generator(self, *purpose: str | int) -> torch.Generator:
        """The random stream of one purpose, such as ("ctl", 1)."""
        return self.config.generator(*purpose)

    def steps(self, name: str, m: int, total: int, **state: State) -> RunSteps:
        """A phase of generation m whose steps change `state`, and nothing else."""
        return RunSteps(Progress(self.directory, name, m, total), state)

    def chunks(
        self, name: str, m: int | None, problem: Problem, total: int, at_once: int, purpose: tuple[str | int, ...]
    ) -> RunChunks:
        """A phase that draws a sample of size `total` after one prompt."""
        progress = Progress(self.directory, f"{name} {problem.name}".strip(), m, total)
        return RunChunks(progress, total, at_once, self.config.streams(*purpose))

    def round_chunks(self, m: int, number: int, problem: Problem) -> RunChunks:
        """A phase that draws a round of the pool, about `--rows` sequences at a time; the first of all from p^(0)."""
        options, name = self.config.pool, f"round {number}"
        total = options.draws if m or number else options.base_draws
        return self.chunks(name, m, problem, total, self.config.rows, (name, m, problem.name))

    def run_chunks(self, name: str, m: int, problem: Problem, particles: int, runs: int) -> RunChunks:
        """A phase that draws so many TSMC runs, about `--rows` particles at a time."""
        return self.chunks(name, m, problem, runs, self.config.rows // particles, (name, m, problem.name))

    def resampling(self) -> dict:
        """How the sampler resamples, and moves its samples: arguments of `sample_runs`."""
        config = self.config
        return {
            "resample": SCHEMES[config.resampling],
            "ess_threshold": config.ess_threshold,
            "moves": config.moves,
        }

    def sample_base(self, name: str, m: int | None, problem: Problem, model: LanguageModel, purpose: tuple) -> Tensor:
        """Independent samples of a bare model for the table."""
        return sample_model(
            model, self.chunks(name, m, problem, self.config.eval.base_samples, self.config.rows, purpose)
        )

    def exact_samples(self, problem: Problem) -> ExactSamples | None:
        """Exact samples of sigma: the shipped ones, or else drawn now and kept in the run; None where the options want none."""
        proposals = self.config.eval.target_proposals
        if problem.exact is not None or proposals == 0:
            return problem.exact
        chunks = self.chunks(
            "target by rejection", None, problem, proposals, self.config.rows, ("target", problem.prompt)
        )
        exact = rejection_sample(problem.base, problem.potential, chunks)
        if len(exact.tokens) < 2:
            fault = (
                f"{len(exact.tokens)} of {proposals} base samples were accepted, so there is no row Target and no KL"
            )
            self.say(f"{fault}; raise --eval-target-proposals to have them")
            return None
        if self.directory.writes:
            save_target(self.directory.path / "target" / problem.name, exact, sigma_key(self.config, problem.prompt))
        return exact

    def say(self, line: str) -> None:
        """A line on standard error, once however many processes there are."""
        if processes.rank() == 0:
            say(line)

    def say_base_rate(self, log_phi: Tensor) -> None:
        """How often p^(0) meets a hard potential; InputError where CTL's batches would hardly ever hold such a text."""
        alive, total = (log_phi > -math.inf).sum().item(), len(log_phi)
        if alive == total:
            return
        pooled = self.config.method == "pooled"
        batch = self.config.pool.base_draws if pooled else self.config.ctl.batch_size
        rate = f"{alive} of {total} base samples have phi > 0"
        self.say(f"{rate}: about {batch * alive / total:.1f} of the {batch} that the twist first learns from")
        if not pooled and batch * alive < total / 2:
            strength = math.ceil(math.log(total / max(alive, 1)))
            remedy = (
                f"use --method pooled, soften the potential (~{strength} behind its name), or raise --ctl-batch-size"
            )
            raise InputError(f"{rate}, too few for --method distilled; {remedy}")

    def evaluate_ends(self) -> list[dict]:
        """Rows of Base and of Target, after each prompt: where p^(0) stands and where sigma does."""
        results = []
        for problem in self.setup.problems:
            problem.exact = self.exact_samples(problem)
            tokens = self.sample_base("base samples", None, problem, problem.base, ("base", problem.name))
            result = {"prompt": problem.prompt, "potential": list(self.config.potential)}
            if problem.exact is not None:
                result["target"], samples = evaluate_target(problem, self.setup.encode)
                self.directory.add_samples(samples.rows("target", problem.name))
            result["base"], samples = evaluate_base(problem, tokens, self.setup.encode)
            self.say_base_rate(samples.log_phi)
            self.directory.add_samples(samples.rows("base", problem.name))
            results.append(result | {"generations": []})
        return results

    def finish_generation(
        self, m: int, model: GPTNeo, sigmas: Sequence[Sigma], twist: nn.Module, results: list[dict]
    ) -> None:
        """Save (p^(m), psi^(m)), measure it after each prompt, and add its rows to the results."""
        if self.directory.writes:
            save_generation(self.directory.path / f"generation-{m}", model, self.setup.tokenizer, twist)
        particles, runs = self.config.eval.particles, self.config.eval.runs
        for problem, sigma, result in zip(self.setup.problems, sigmas, results, strict=True):
            chunks = self.run_chunks("evaluation", m, problem, particles, runs)
            population = sample_runs(sigma, twist, particles, chunks, **self.resampling())
            bare = result["base"] if model is self.setup.model else self.bare_scores(m, problem, sigma.model)
            row, samples = evaluate_generation(problem, sigma, twist, m, population, self.setup.encode)
            row |= {f"model_{name}": bare[name] for name in ("toxicity", "log_phi", "phi_positive")}
            self.directory.add_samples(samples.rows(f"generation {m}", problem.name))
            if row["dead_runs"] > runs / 10:
                dead = (
                    f"{row['dead_runs']} of {runs} runs died, all weights zero; samples and log Z-hat are of the others"
                )
                self.say(f"generation {m}: {dead}; raise --eval-particles, or soften the potential")
            result["generations"].append(row)

    def bare_scores(self, m: int, problem: Problem, model: LanguageModel) -> dict[str, float]:
        """Mean scores of p^(m) without a twist."""
        tokens = self.sample_base("bare model", m, problem, model, ("bare model", m, problem.name))
        return mean_scores(score(tokens, problem.potential, problem.log_toxicity))

    def note_held_out(self, m: int, before: float, after: float) -> None:
        """One line of metrics.jsonl: what distillation did to the loss on samples that were held out."""
        losses = {"held_out_before": before, "held_out_after": after}
        self.directory.log({"phase": "distillation", "generation": m, "step": self.config.distill.updates, **losses})

    def finish(self, results: list[dict]) -> None:
        """Figures and results.json."""
        from eval.run.figures import draw_figures  # matplotlib takes its time to load

        draw_figures(results, self.directory)
        self.directory.finish(results, self.config.keep_states)
