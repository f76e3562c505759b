"""The sentences of the report that claim something, each made from the numbers it speaks of.

A change counts as seen only where its 95 % interval over seeds leaves out zero; otherwise the sentence says that these seeds
cannot tell. Nothing is claimed that the numbers of the study at hand do not show.
"""

import itertools
from dataclasses import dataclass

from eval.numbers import NAMES, Number, Numbers
from eval.study import StudyConfig

TSMC = NAMES["tsmc"]
PAPER_KL = (7.971, 7.030, 7.016)
PAPER_REJECTION = {0.0: (1.0, 0.010, 0.456), 1.0: (0.0099, 0.378, 0.405), 10.0: (0.0006, 0.913, 0.398)}


@dataclass(frozen=True)
class Claim:
    """A sentence, and whether it agrees with the paper: "yes", "no" or "open"."""

    verdict: str
    text: str


def signed(row: Number, digits: int = 2) -> str:
    """A change with its interval: +0.52 (+0.47 to +0.57)."""
    text = f"{row.value:+.{digits}f}"
    if row.low is None:
        return f"{text} (one value, no interval)"
    return f"{text} ({row.low:+.{digits}f} to {row.high:+.{digits}f})"


def direction(row: Number) -> int:
    """+1 or -1 where the interval of a change lies on one side of zero, else 0."""
    if row.low is None or row.high is None:
        return 0
    return 1 if row.low > 0 else -1 if row.high < 0 else 0


def moved(row: Number, wanted: int, rises: str, falls: str, level: str) -> tuple[str, str]:
    """Verdict and verb of a change that the paper has with sign `wanted`."""
    seen = direction(row)
    verdict = "open" if seen == 0 else "yes" if seen == wanted else "no"
    return verdict, {1: rises, -1: falls, 0: level}[seen]


def claims(study: StudyConfig, numbers: Numbers) -> list[Claim]:
    """What the paper says, and what the numbers say to it."""
    last = study.run.generations
    found = [*kl_claims(study, numbers)]
    if last > 0:
        found += [toxicity_claim(study, numbers), *similarity_claims(study, numbers), particle_claim(study, numbers)]
        found += [drift_claim(study, numbers)]
    found += baseline_claims(study, numbers)
    return [claim for claim in found if claim is not None]


def kl_claims(study: StudyConfig, numbers: Numbers) -> list[Claim]:
    """KL(sigma||q) falls from generation to generation, by little the second time."""
    found = []
    for m in range(study.run.generations):
        row = numbers.get("changes", f"generation {m} to {m + 1}", "mean", "", "kl")
        verdict, verb = moved(row, -1, "rises", "falls", "shows no clear change")
        paper = f" (paper: {PAPER_KL[m + 1] - PAPER_KL[m]:+.3f})" if m + 1 < len(PAPER_KL) else ""
        found.append(Claim(verdict, f"KL(σ‖q) {verb} from generation {m} to {m + 1}: {signed(row)} nats{paper}."))
    return found


def toxicity_claim(study: StudyConfig, numbers: Numbers) -> Claim:
    """Toxicity rises towards Target's."""
    last = study.run.generations
    name = f"generation 0 to {last}"
    row = numbers.get("changes", name, "mean", "", "toxicity")
    verdict, verb = moved(row, 1, "rises", "falls", "shows no clear change")
    end = numbers.get("generations", TSMC, "mean", last, "toxicity")
    target = numbers.get("rejection", f"beta {study.run.beta:g}", "", "", "toxicity")
    words = f"it ends at {end.value:.3f}, Target is at {target.value:.3f}"
    return Claim(verdict, f"Toxicity at K = {study.run.eval.particles} {verb} from {name}: {signed(row)}; {words}.")


def similarity_claims(study: StudyConfig, numbers: Numbers) -> list[Claim]:
    """The generations approach Target on the plane; similarity comes to lie at Target's."""
    last = study.run.generations
    row = numbers.get("changes", f"Target to generation {last}", "mean", "", "similarity")
    seen = direction(row)
    words = {1: "above Target's: the samples are less diverse than those of σ", -1: "below Target's"}
    text = words.get(seen, "not told apart from Target's")
    found = [Claim("no" if seen else "yes", f"Similarity of generation {last} is {text}, by {signed(row)}.")]
    points = [numbers.get("generations", TSMC, "mean", m, "distance").value for m in range(last + 1)]
    nearer = all(after < before for before, after in itertools.pairwise(points))
    path = " → ".join(f"{point:.3f}" for point in points)
    verb = "shrinks with every generation" if nearer else "does not shrink with every generation"
    found.append(
        Claim(
            "yes" if nearer else "no",
            f"The distance to Target on the similarity–toxicity plane {verb}: {path} (means).",
        )
    )
    return found


def particle_claim(study: StudyConfig, numbers: Numbers) -> Claim:
    """A later generation needs fewer particles."""
    last, few, many = study.run.generations, min(study.particle_counts), max(study.particle_counts)
    a = numbers.get("particles", f"K = {few}", "mean", last, "toxicity").value
    b = numbers.get("particles", f"K = {many}", "mean", 0, "toxicity").value
    verdict, verb = ("yes", "is above") if a > b else ("no", "does not reach")
    words = (
        f"Generation {last} with K = {few} ({a:.3f}) {verb} generation 0 with K = {many} ({b:.3f}) in toxicity (means)."
    )
    return Claim(verdict, words)


def drift_claim(study: StudyConfig, numbers: Numbers) -> Claim:
    """Without the effective potential the target drifts."""
    last = study.run.generations
    row = numbers.get("generations", NAMES["no-effective"], "mean", last, "drift")
    verdict, verb = moved(row, 1, "drifts", "does not drift", "cannot be seen to drift")
    return Claim(
        verdict, f"Without φ⁽ᵐ⁾ the target of generation {last} {verb}: KL(σ‖σ_m) = {signed(row).lstrip('+')} nats."
    )


def baseline_claims(study: StudyConfig, numbers: Numbers) -> list[Claim]:
    """TSMC comes nearer to Target than each of the baselines."""
    found = []
    for key, row in numbers.rows.items():
        if key[0] == "changes" and key[1].startswith(f"{TSMC} to "):
            method = key[1].removeprefix(f"{TSMC} to ").split(", lr")[0]
            seen = direction(row)
            words = {1: "lies farther from Target than TSMC", -1: "lies nearer to Target than TSMC"}
            text = words.get(seen, "cannot be told from TSMC in its distance to Target")
            verdict = {1: "yes", -1: "no"}.get(seen, "open")
            found.append((method, Claim(verdict, f"The best {method} {text}: {signed(row, 3)}.")))
    return [claim for _, claim in sorted(found, key=lambda pair: pair[0])]
