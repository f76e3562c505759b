"""What each part of a study computes: one JSON-ready object of numbers with 95 % intervals, and texts with their scores.

rejection                   here        tsmc, no-effective, lora, particles, resampling     eval.trained
a run of a baseline         here
"""

from pathlib import Path
from typing import Any

import torch

from distill import dpo, grpo
from eval.metrics import Samples, score
from eval.paper.study import Part, StudyConfig, cost_of
from eval.paper.task import BINS, Task, distance, number, read_part, share
from eval.paper.trained import particle_study, resampling_study, whole_run
from eval.run.setup import sigma_key
from eval.run.target import Target, load_target, save_target
from tinystories import InputError
from tsmc.estimate import Estimate, mean_estimate
from tsmc.rejection import accept, log_mean_with_error
from tsmc.steps import Phase
from twist.potential import each_once


def compute(study: StudyConfig, part: Part, out: Path) -> dict:
    """The numbers and texts of one part; InputError names what is at fault."""
    task = Task(study, part, out)
    if part.kind == "rejection":
        return rejection(task)
    task.problem.target = target_of(task)
    kinds = {"particles": particle_study, "resampling": resampling_study, "baseline": baseline, "best": baseline}
    return kinds.get(part.kind, whole_run)(task)


def target_of(task: Task) -> Target:
    """The shipped samples of sigma, or those that the rejection part has drawn."""
    place = task.out / "target"
    target = task.problem.target or load_target(place, sigma_key(task.config, task.problem.prompt))
    if target is None:
        raise InputError(f"{place}: made for other options; choose another --out")
    return target.to(task.problem.base.prompt.device)


def rejection(task: Task) -> dict:
    """Rejection sampling at every beta from one set of base samples; where exact samples are shipped they serve their beta.

    At the beta of the study the samples are kept for the other parts where none are shipped.
    """
    config, problem = task.config, task.problem
    proposals = task.draw(problem.base, task.study.rejection_samples, "rejection")  # [N, T]
    scores = [each_once(problem.toxicity, problem.potential.texts(part)) for part in proposals.split(config.rows)]
    scores = torch.cat(scores).to(proposals.device)  # [N]
    rows = []
    for beta in sorted({*task.study.rejection_betas, config.beta}):
        target = problem.target if beta == config.beta else None
        if target is None:
            target = accepted(task, proposals, scores, beta)
            if beta == config.beta:
                save_target(task.out / "target", target, sigma_key(config, problem.prompt))
        row = {"beta": beta, **rejection_row(task, target, beta)}
        if beta == config.beta:
            row["kl_base"] = task.kl(problem.base, None, target)
        rows.append(row)
    return {"rows": rows}


def accepted(task: Task, proposals: torch.Tensor, scores: torch.Tensor, beta: float) -> Target:
    """Exact samples at one beta among proposals [N, T] with log p(toxic | s) [N]; InputError where they are too few."""
    log_phi = beta * scores if beta > 0 else torch.zeros_like(scores)
    kept = accept(log_phi, task.config.generator("accept", str(beta)))
    if int(kept.sum()) < 2:
        words = f"{int(kept.sum())} of {len(proposals)} base samples were accepted at beta {beta:g}"
        raise InputError(f"{words}; raise the number of samples for rejection")
    return Target(proposals[kept], log_phi[kept], len(proposals), *log_mean_with_error(log_phi))


def rejection_row(task: Task, target: Target, beta: float) -> dict:
    """Acceptance, toxicity of all accepted samples and similarity of the first of them."""
    samples = score(task.problem, target.tokens, list(range(len(target.tokens))))
    few = task.study.similarity_samples
    first = Samples(samples.texts[:few], samples.toxicity[:few], samples.log_phi[:few], samples.group[:few])
    return task.measure(first, str(beta)) | {
        "toxicity": number(mean_estimate(samples.toxicity)),
        "histogram": torch.histc(samples.toxicity.float(), BINS, 0, 1).int().tolist(),
        "sequences": len(samples.texts),
        "fluency": task.fluency(target.tokens[:few]),
        "acceptance": share(len(target.tokens), target.num_proposals),
        "proposals": target.num_proposals,
        "log_z": number(Estimate(target.log_z, target.log_z_std_error, target.num_proposals - 1.0)),
    }


def baseline(task: Task) -> dict:
    """One run of DPO or GRPO and its policy's samples; a run that diverges is a result too: "failed" says how."""
    part, config, problem = task.part, task.config, task.problem
    grid = task.study.grid(part.method)
    place = part.place if part.kind == "baseline" else best_place(task, len(grid))
    chosen, train = grid[place], dpo if part.method.startswith("dpo") else grpo
    cost = cost_of(part.method, chosen)
    found: dict[str, Any] = {
        "method": part.method,
        "place": place,
        "seed": part.seed,
        "learning_rate": chosen.learning_rate,
        "weight_decay": chosen.weight_decay,
        "strength": chosen.strength,
        "updates": chosen.updates,
        "batch_size": chosen.batch_size,
        "units": cost.units(config.length),
        "scored": cost.sampled,
    }
    generator = config.generator("baseline", part.method, place)
    try:
        policy = train(problem.base, problem.potential, chosen, part.method.endswith("lora"), generator, Phase())
    except InputError as error:
        return found | {"failed": str(error)}
    tokens = task.draw(policy, config.eval.base_samples, "policy", part.name)
    found |= task.measure(score(problem, tokens, list(range(len(tokens)))), "policy", part.name)
    return found | {"kl": task.kl(policy, None, problem.target), "fluency": task.fluency(tokens)}


def best_place(task: Task, size: int) -> int:
    """Place in the grid of the run of the sweep that is nearest to Target."""
    rows = read_part(task.out, "rejection")["rows"]
    target = next(row for row in rows if row["beta"] == task.study.run.beta)
    sweep = [read_part(task.out, f"{task.part.method}-{place + 1}") for place in range(size)]
    return min(range(size), key=lambda place: distance(sweep[place], target))
