"""The sentences of the report that claim something, each made from the numbers it speaks of.

A change counts as seen only where its 95 % interval over seeds leaves out zero; otherwise the sentence says that these seeds
cannot tell. Nothing is claimed that the numbers of the study at hand do not show.
"""

from dataclasses import dataclass

from eval.paper.numbers import NAMES, Number, Numbers
from eval.paper.study import StudyConfig

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
    found = kl_claims(study, numbers)
    if study.run.generations > 0:
        found += [toxicity_claim(study, numbers), *plane_claims(study, numbers), particle_claim(study, numbers)]
    return found + baseline_claims(study, numbers)


def kl_claims(study: StudyConfig, numbers: Numbers) -> list[Claim]:
    """KL(sigma||q) falls from generation to generation, by little the second time."""
    found = []
    for m in range(study.run.generations):
        row = numbers.get("changes", f"generation {m} to {m + 1}", "mean", "", "kl")
        if row is None:  # infinite in some seed
            continue
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


def plane_claims(study: StudyConfig, numbers: Numbers) -> list[Claim]:
    """The generations approach Target on the plane, and keep its diversity."""
    last = study.run.generations
    row = numbers.get("changes", f"generation 0 to {last}", "mean", "", "distance")
    verdict, verb = moved(row, -1, "grows", "shrinks", "shows no clear change")
    points = [numbers.get("generations", TSMC, "mean", m, "distance").value for m in range(last + 1)]
    path = " → ".join(f"{point:.3f}" for point in points)
    text = f"The distance to Target on the plane of the first figure {verb} over the generations: {path}, {signed(row, 3)}."
    found = [Claim(verdict, text)]
    row = numbers.get("changes", f"Target to generation {last}", "mean", "", "similarity")
    words = {
        1: "above Target’s, so the samples are less diverse than those of σ",
        -1: "below Target’s",
        0: "not told apart from Target’s",
    }
    seen = direction(row)
    text = f"Similarity of generation {last} is {words[seen]}: {signed(row)} from Target."
    return [*found, Claim("open" if seen == 0 else "no", text)]


def particle_claim(study: StudyConfig, numbers: Numbers) -> Claim:
    """A later generation needs fewer particles."""
    last, few, many = study.run.generations, min(study.particle_counts), max(study.particle_counts)
    row = numbers.get("changes", f"K = {many}, generation 0 to K = {few}, generation {last}", "mean", "", "toxicity")
    verdict, verb = moved(row, 1, "is more toxic than", "is less toxic than", "cannot be told from")
    words = f"generation 0 with K = {many} at its disposal: {signed(row)}"
    return Claim(verdict, f"Generation {last} with K = {few} {verb} {words}.")


def baseline_claims(study: StudyConfig, numbers: Numbers) -> list[Claim]:
    """TSMC comes nearer to Target than each of the baselines."""
    found = {}
    for key, row in numbers.rows.items():
        method = key[1].removeprefix(f"{TSMC} to ").split(", lr")[0]
        if key[0] == "changes" and key[2] == "mean" and method in NAMES.values() and ", lr" in key[1]:
            verdict, verb = moved(row, 1, "farther from Target than TSMC", "nearer to Target than TSMC", "")
            text = f"lies {verb}" if verb else "cannot be told from TSMC in its distance to Target"
            kl = numbers.get("best", key[1].removeprefix(f"{TSMC} to "), "mean", "", "kl")
            own = numbers.get("generations", TSMC, "mean", study.run.generations, "kl")
            beside = (
                f"; its KL(σ‖π) is {kl.value:.1f} nats, that of TSMC’s proposal {own.value:.1f}" if kl and own else ""
            )
            found[method] = Claim(verdict, f"The best {method} {text}: {signed(row, 3)}{beside}.")
    for method in {name.split(", lr")[0] for name in numbers.names("best")} - found.keys():
        text = f"The best {method} of the first seed diverged on another, so there is no mean to compare."
        found[method] = Claim("open", text)
    return [claim for _, claim in sorted(found.items())]


def findings(study: StudyConfig, numbers: Numbers) -> list[str]:
    """What the paper leaves open, as far as these numbers tell."""
    last = study.run.generations
    if last == 0:
        return []
    drift = numbers.get("generations", NAMES["no-effective"], "mean", last, "drift")
    found = []
    if drift is not None:
        _, verb = moved(drift, 1, "drifts from σ", "does not drift", "cannot be seen to drift")
        found.append(f"Without φ⁽ᵐ⁾ the target of generation {last} {verb}: KL(σ‖σ_m) is {signed(drift)} nats.")
    for variant, what in (("no-effective", "Without φ⁽ᵐ⁾"), ("lora", "With LoRA in place of full distillation")):
        parts = []
        for quantity, name, digits in (
            ("toxicity", "toxicity", 3),
            ("similarity", "similarity", 3),
            ("kl", "KL(σ‖q)", 2),
        ):
            row = numbers.get("changes", f"{TSMC} to {NAMES[variant]}", "mean", "", quantity)
            if row is not None:
                verb = {1: "rises", -1: "falls", 0: "shows no clear change"}[direction(row)]
                parts.append(f"{name} {verb}, {signed(row, digits)}")
        found.append(f"{what}, in generation {last}: {'; '.join(parts)}.")
    return found
