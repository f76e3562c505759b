"""The sections of the report that hold numbers: each reads `eval.numbers` and sets the paper's own values beside ours.

Rows are named by place, (section, name, seed, generation) in the table of numbers; columns by quantity.
"""

from html import escape
from pathlib import Path

from eval.paper.claims import PAPER_KL, PAPER_REJECTION, claims, findings
from eval.paper.numbers import NAMES, Numbers, setting_names
from eval.paper.report.page import cell, figure, section, table, typeset
from eval.paper.study import StudyConfig

TSMC, LORA, WITHOUT = NAMES["tsmc"], NAMES["lora"], NAMES["no-effective"]
VERDICTS = {"yes": "Agrees", "no": "Does not agree", "open": "Cannot tell"}
COLUMNS = {  # title and digits of each quantity
    "acceptance": ("Acceptance in %", 3),
    "toxicity": ("Toxicity", 3),
    "similarity": ("Similarity", 3),
    "kl": ("KL(σ‖q)", 2),
    "distance": ("Distance to Target", 3),
    "log_z_hat": ("log Ẑ", 2),
    "log_z_hat_mean": ("log Ẑ", 2),
    "log_z_hat_std": ("Spread of log Ẑ", 2),
    "ess": ("ESS", 1),
    "distinct": ("Distinct", 2),
    "model_toxicity": ("Toxicity of bare p⁽ᵐ⁾", 2),
    "fluency": ("log p⁽⁰⁾ a token", 2),
    "drift": ("Drift KL(σ‖σ_m)", 2),
    "sequences": ("Accepted", 0),
    "proposals": ("of proposals", 0),
    "runs": ("Runs a seed", 0),
    "units": ("Token positions", 0),
    "scored": ("Texts scored", 0),
    "updates": ("Updates", 0),
    "batch_size": ("Batch", 0),
}
Section = tuple[str, str, str]
Place = tuple[str, str, int | str, int | str]


def cells(numbers: Numbers, place: Place, quantities: tuple[str, ...]) -> list[str]:
    """One row's cells, shares of the column in percent as such."""
    return [
        cell(numbers.get(*place, name), COLUMNS[name][1], 100 if name == "acceptance" else 1) for name in quantities
    ]


def grid(
    numbers: Numbers,
    caption: str,
    quantities: tuple[str, ...],
    rows: list[tuple[str, Place]],
    marked: tuple[int, ...] = (),
) -> str:
    """A table of labelled places by quantities."""
    lines = [[label, *cells(numbers, place, quantities)] for label, place in rows]
    return table(caption, ["", *(COLUMNS[name][0] for name in quantities)], lines, marked)


def over_seeds(study: StudyConfig) -> str:
    """What the intervals of means stand for."""
    return f"means over {len(study.seeds)} seeds with 95 % intervals (Student’s t)"


def generations(study: StudyConfig) -> range:
    """0 to M."""
    return range(study.run.generations + 1)


def target_place(study: StudyConfig) -> Place:
    """Target among the numbers."""
    return "rejection", f"beta {study.run.beta:g}", "", ""


def summary(study: StudyConfig, numbers: Numbers) -> Section:
    """The main numbers and what they say to the paper."""
    columns, target = ("toxicity", "similarity", "kl", "fluency"), target_place(study)
    rows = []
    for name, place in (("Base", ("rejection", "beta 0", "", "")), ("Target", target)):
        rows.append([name, *cells(numbers, place, columns)])
    rows[0][3] = cell(numbers.get(*target, "kl_base"), 2)
    for m in generations(study):
        found = cells(numbers, ("generations", TSMC, "mean", m), columns[:3])
        drawn = "particles", f"K = {study.run.eval.particles}", "mean", m
        rows.append([f"TSMC, generation {m}", *found, *cells(numbers, drawn, columns[3:])])
    for method in study.methods:
        for name in setting_names(numbers, "best", method):
            rows.append([f"Best {NAMES[method]}", *cells(numbers, ("best", name, "mean", ""), columns)])
    caption = (
        f"Main numbers, {over_seeds(study)}; Base and Target have the interval of their samples. TSMC with "
        f"K = {study.run.eval.particles}. KL(σ‖q) in nats; for Base and the baselines q is the model itself. Last column: "
        "mean log p⁽⁰⁾ of a token in the samples, low where the base model finds them unreadable."
    )
    head = ["", *(COLUMNS[name][0] for name in columns)]
    items = [
        f'<li class="{claim.verdict}"><b>{VERDICTS[claim.verdict]}</b><span>{typeset(escape(claim.text))}</span></li>'
        for claim in claims(study, numbers)
    ]
    others = "".join(f"<li>{typeset(escape(text))}</li>" for text in findings(study, numbers))
    return section(
        "summary",
        "Summary",
        table(caption, head, rows, marked=(1, 2 + study.run.generations)),
        "<h3>What agrees with the paper and what does not</h3>",
        f'<ul class="claims">{"".join(items)}</ul>',
        '<p class="note">Each line is computed from the numbers: a change counts as seen where its interval over seeds '
        "leaves out zero. Distances take Target as it is; on the first seed the best baseline is also the one that was chosen "
        "there. The comparison is with what the paper reports at its own scale.</p>",
        f"<h3>What the paper leaves open</h3><ul>{others}</ul>" if others else "",
    )


def rejection(study: StudyConfig, numbers: Numbers, folder: Path) -> Section:
    """The rejection table and the histograms."""
    rows, shares = [], []
    for name in numbers.names("rejection"):
        beta, place = float(name.split()[1]), ("rejection", name, "", "")
        theirs = PAPER_REJECTION.get(beta)
        paper = [f"{100 * theirs[0]:.2f}", f"{theirs[1]:.3f}", f"{theirs[2]:.3f}"] if theirs else ["–"] * 3
        columns = ("sequences", "proposals", "acceptance", "toxicity", "similarity")
        rows.append([f"β = {beta:g}", *cells(numbers, place, columns), *paper])
        shares.append(f"{cell(numbers.get(*place, 'toxic_share'), 2, 100)} % at β = {beta:g}")
    head = ["", *(COLUMNS[name][0] for name in columns), "Paper: acceptance", "toxicity", "similarity"]
    caption = (
        "Rejection sampling from Base at several strengths of the potential (paper, Table 1). Acceptance with Wilson’s "
        f"interval; similarity of at most {study.similarity_samples} samples, with a bootstrap interval."
    )
    picture = figure(
        folder / "toxicity-histograms.svg",
        "Toxicity of the accepted samples; the axis of shares is logarithmic (paper, Figure 3). At 0.5 and above lie "
        f"{', '.join(shares)}.",
        "Histogram of toxicity for each beta, logarithmic axis.",
    )
    return section("rejection", "Rejection sampling", table(caption, head, rows), picture)


def plane(study: StudyConfig, numbers: Numbers, folder: Path) -> Section:
    """Similarity against toxicity."""
    picture = figure(
        folder / "similarity-toxicity.svg",
        "Similarity against toxicity; up and to the left is better, and Target is what a sampler of σ would reach "
        f"(paper, Figure 1). Numbered circles: TSMC generations with K = {study.run.eval.particles}, {over_seeds(study)}; thin "
        "lines: single seeds. Faint points: every run of the baselines’ sweep, on the first seed; full ones: the best of each, "
        "over all seeds. Best is the run of the sweep nearest to Target. Intervals wider than the frame are cut.",
        "Scatter plot of similarity against toxicity.",
    )
    columns = (
        "toxicity",
        "similarity",
        "distance",
        "log_z_hat_mean",
        "log_z_hat_std",
        "ess",
        "distinct",
        "model_toxicity",
    )
    evidence = typeset(f"{numbers.get(*target_place(study), 'log_z').value:.2f}")
    caption = f"The generations, {over_seeds(study)}. log Z of σ by rejection: {evidence}."
    rows = [(f"Generation {m}", ("generations", TSMC, "mean", m)) for m in generations(study)]
    return section("plane", "Similarity and toxicity", picture, grid(numbers, caption, columns, rows))


def particles(study: StudyConfig, numbers: Numbers, folder: Path) -> Section:
    """Toxicity against K."""
    picture = figure(
        folder / "toxicity-particles.svg",
        f"Toxicity against the number of particles K by generation, {over_seeds(study)}; dashed: Target (paper, Figure 2). "
        "In the paper a later generation lies higher, most of all at the left.",
        "Line plot of toxicity against the number of particles.",
    )
    columns = ("runs", "toxicity", "similarity", "log_z_hat", "log_z_hat_std", "distinct", "fluency")
    rows = [
        (f"K = {count}, generation {m}", ("particles", f"K = {count}", "mean", m))
        for count in study.particle_counts
        for m in generations(study)
    ]
    words = (
        f"The points of the figure, {over_seeds(study)}. Similarity does not compare across K: particles of one run share "
        "ancestors, and with few large runs more of the pairs lie within a run."
    )
    points = grid(numbers, words, columns, rows)
    return section("particles", "Number of particles", picture, points)


def divergence(study: StudyConfig, numbers: Numbers) -> Section:
    """KL(sigma||q) by generation beside the paper's."""
    seeds = ("mean", *study.seeds)
    rows = []
    for m in generations(study):
        found = [cell(numbers.get("generations", TSMC, seed, m, "kl"), 2) for seed in seeds]
        rows.append([f"Generation {m}", *found, f"{PAPER_KL[m]:.3f}" if m < len(PAPER_KL) else "–"])
    for m in range(study.run.generations):
        name = f"generation {m} to {m + 1}"
        found = [cell(numbers.get("changes", name, seed, "", "kl"), 2, sign="+") for seed in seeds]
        theirs = typeset(f"{PAPER_KL[m + 1] - PAPER_KL[m]:+.3f}") if m + 1 < len(PAPER_KL) else "–"
        rows.append([f"Change, {name}", *found, theirs])
    caption = (
        "KL(σ‖q) in nats between the target and the twist-induced proposal. Intervals of the mean are over seeds, those of a "
        "seed over the exact samples and log Z. All seeds share the exact samples; changes are paired over them, and their "
        "error joins that over seeds. The paper’s values belong to other networks: compare the changes."
    )
    head = ["", "Mean", *(f"Seed {seed}" for seed in study.seeds), "Paper"]
    return section("kl", "KL(σ‖q)", table(caption, head, rows))


def ablations(study: StudyConfig, numbers: Numbers) -> Section:
    """Effective potential, LoRA, resampling schemes."""
    columns = ("toxicity", "similarity", "kl", "log_z_hat_mean", "model_toxicity", "drift")
    caption = (
        "Algorithm 1 as it is, with φ in place of the effective potential φ⁽ᵐ⁾, and with LoRA in place of full distillation, "
        f"{over_seeds(study)}. Generation 0 is the same in all. Drift: how far σ_m ∝ p⁽ᵐ⁾φ, the target of a generation "
        "without φ⁽ᵐ⁾, has left σ; with φ⁽ᵐ⁾ there is none by construction. log Ẑ without φ⁽ᵐ⁾ estimates the evidence of σ_m."
    )
    rows = [
        (f"{name}, generation {m}", ("generations", name, "mean", m))
        for m in generations(study)
        for name in (TSMC, WITHOUT, LORA)
    ]
    words = (
        f"Resampling schemes on the trained pairs, K = {study.run.eval.particles}, {study.resampling_runs} runs a seed, "
        f"{over_seeds(study)}. Learning used multinomial resampling at every step, as the paper does. The last resampling is "
        "drawn in every row."
    )
    kept = ("toxicity", "similarity", "log_z_hat", "log_z_hat_std", "ess", "distinct")
    schemes = [
        grid(
            numbers,
            f"Generation {m}",
            kept,
            [(escape(name), ("resampling", name, "mean", m)) for name in numbers.names("resampling")],
        )
        for m in generations(study)
    ]
    variants = grid(numbers, caption, columns, rows)
    headings = "<h3>Effective potential and LoRA</h3>", f"<h3>Resampling</h3><p>{words}</p>"
    return section("ablations", "Ablations", headings[0], variants, headings[1], *schemes)


def baselines(study: StudyConfig, numbers: Numbers) -> Section:
    """Budgets, the best runs, the sweep."""
    first = study.seeds[0]
    rows: list[tuple[str, Place]] = [("TSMC, Algorithm 1", ("budget", TSMC, "", ""))]
    best: list[tuple[str, Place]] = []
    for method in study.methods:
        rows.append((NAMES[method], ("sweep", setting_names(numbers, "sweep", method)[0], first, "")))
        for name in setting_names(numbers, "best", method):
            for seed, label in (
                (first, f"seed {first}, chosen on it"),
                ("other seeds", "other seeds"),
                ("mean", "all"),
            ):
                best.append((f"{escape(name)}<small>{label}</small>", ("best", name, seed, "")))
    budget = grid(
        numbers,
        "Equal footing: token positions through the language model (forward and backward together count three), and texts "
        "scored by the classifier, in one run. Evaluation is left out.",
        ("units", "scored", "updates", "batch_size"),
        rows,
    )
    columns = ("toxicity", "similarity", "distance", "kl", "fluency")
    means = (numbers.get("rejection", name, "", "", "fluency") for name in ("beta 0", target_place(study)[1]))
    base, target = (cell(row, 2) for row in means)
    chosen = grid(
        numbers,
        "The best of each sweep, chosen on the first seed by the smallest Euclidean distance to Target on the "
        "similarity–toxicity plane. The other seeds had no say in the choice, so they show what choosing was worth. The plane "
        "does not ask for English: KL(σ‖π) and the mean log p⁽⁰⁾ of a token in the samples do "
        f"(Base {base}, Target {target}).",
        columns,
        best,
    )
    whole = f"<details><summary>The whole sweep</summary>{sweep(study, numbers, columns)}</details>"
    return section("baselines", "Baselines", budget, chosen, whole)


def sweep(study: StudyConfig, numbers: Numbers, columns: tuple[str, ...]) -> str:
    """Every run of the sweep; the best of each method is bold, the most toxic one says so, and so does one that diverged."""
    first, rows, marked = study.seeds[0], [], []
    for method in study.methods:
        names = setting_names(numbers, "sweep", method)
        toxicity = {name: numbers.get("sweep", name, first, "", "toxicity") for name in names}
        most = max((row.value for row in toxicity.values() if row is not None), default=None)
        for name in names:
            if name in setting_names(numbers, "best", method):
                marked.append(len(rows))
            row = toxicity[name]
            note = " (diverged)" if row is None else " (most toxic)" if row.value == most else ""
            rows.append((escape(name) + note, ("sweep", name, first, "")))
    return grid(
        numbers, f"Every run of the sweep, seed {first}; the best of each in bold.", columns, rows, tuple(marked)
    )
