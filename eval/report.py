"""The report of a study: report.html, complete in itself, with results.json, results.csv and the figures beside it.

It is made from `eval.numbers` alone, and its claims from `eval.claims`, so it says nothing that the numbers do not. The
paper's own numbers stand beside ours where it gives any.
"""

import json
from html import escape
from pathlib import Path

from eval import paper_figures
from eval.claims import PAPER_KL, PAPER_REJECTION, claims, findings
from eval.numbers import NAMES, Numbers, collect, setting_names, write_numbers
from eval.page import cell, figure, page, plain, section, table, text_table, typeset
from eval.study import Part, StudyConfig
from tinystories.checkpoint import read_json, write_text

TSMC, LORA, WITHOUT = NAMES["tsmc"], NAMES["lora"], NAMES["no-effective"]
VERDICTS = {"yes": "Agrees", "no": "Does not agree", "open": "Cannot tell"}


def write_report(study: StudyConfig, parts: list[Part], out: Path, command: str) -> None:
    """results.json, results.csv, figures and report.html of a study whose parts have all finished."""
    numbers, texts = collect(study, parts, out)
    write_numbers(numbers, texts, out)
    paper_figures.draw(study, numbers, out)
    write_text(out / "report.html", document(study, parts, numbers, texts, out, command))


def document(
    study: StudyConfig, parts: list[Part], numbers: Numbers, texts: list[dict], out: Path, command: str
) -> str:
    """The report's HTML."""
    seeds = ", ".join(map(str, study.seeds))
    times = {part.name: read_json(out / "times" / f"{part.name}.json")["seconds"] for part in parts}
    lead = (
        f"The experimental section of arXiv:2507.02315 on the <b>{escape(study.run.preset)}</b> preset: seeds {seeds}, "
        f"{study.run.generations} generations after generation 0, β = {study.run.beta:g}. {len(parts)} parts took "
        f"{sum(times.values()) / 60:.0f} minutes of one core. Intervals are 95 %."
    )
    sections = [
        summary(study, numbers),
        rejection(study, numbers, out),
        plane(study, numbers, out),
        particles(study, numbers, out),
        divergence(study, numbers),
        ablations(study, numbers),
        baselines(study, numbers),
        examples(texts),
        making(parts, times, out, command),
    ]
    footer = "Every number of this page is in <code>results.csv</code> and <code>results.json</code> beside it."
    return page("Self-distilled twisted SMC: the study", lead, sections, footer)


def over_seeds(study: StudyConfig) -> str:
    """What the intervals of means stand for."""
    return f"means over {len(study.seeds)} seeds with 95 % intervals (Student’s t)"


def summary(study: StudyConfig, numbers: Numbers) -> tuple[str, str, str]:
    """The main numbers and what they say to the paper."""
    target = f"beta {study.run.beta:g}"
    rows = []
    for name, beta in (("Base", "beta 0"), ("Target", target)):
        found = [cell(numbers.get("rejection", beta, "", "", q)) for q in ("toxicity", "similarity")]
        rows.append([name, *found, cell(numbers.get("rejection", beta, "", "", "kl_base"), 2)])
    for m in range(study.run.generations + 1):
        found = [cell(numbers.get("generations", TSMC, "mean", m, q)) for q in ("toxicity", "similarity")]
        kl = cell(numbers.get("generations", TSMC, "mean", m, "kl"), 2)
        rows.append([f"TSMC, generation {m}", *found, kl])
    for method in study.methods:
        for name in setting_names(numbers, "best", method):
            found = [cell(numbers.get("best", name, "mean", "", q)) for q in ("toxicity", "similarity")]
            rows.append([f"Best {NAMES[method]}", *found, cell(numbers.get("best", name, "mean", "", "kl"), 2)])
    items = [
        f'<li class="{claim.verdict}"><b>{VERDICTS[claim.verdict]}</b><span>{typeset(escape(claim.text))}</span></li>'
        for claim in claims(study, numbers)
    ]
    caption = (
        f"Main numbers, {over_seeds(study)}; Base and Target have the interval of their samples. TSMC with "
        f"K = {study.run.eval.particles}. KL(σ‖q) in nats, for Base and the baselines that of the model itself."
    )
    last = study.run.generations
    main = table(caption, ["", "Toxicity", "Similarity", "KL"], rows, marked=(1, 2 + last))
    note = (
        '<p class="note">Each line is computed from the numbers: a change counts as seen where its interval over seeds '
        "leaves out zero. “Agrees” and “does not agree” compare with what the paper reports at its own scale.</p>"
    )
    heading = "<h3>What agrees with the paper and what does not</h3>"
    others = "".join(f"<li>{typeset(escape(text))}</li>" for text in findings(study, numbers))
    return section(
        "summary",
        "Summary",
        main,
        heading,
        f'<ul class="claims">{"".join(items)}</ul>',
        note,
        "<h3>What the paper leaves open</h3>",
        f"<ul>{others}</ul>",
    )


def rejection(study: StudyConfig, numbers: Numbers, out: Path) -> tuple[str, str, str]:
    """The rejection table and the histograms."""
    rows = []
    for name in dict.fromkeys(key[1] for key in numbers.rows if key[0] == "rejection"):
        beta = float(name.split()[1])
        theirs = PAPER_REJECTION.get(beta)
        get = lambda quantity, name=name: numbers.get("rejection", name, "", "", quantity)  # noqa: E731
        paper = [f"{100 * theirs[0]:.2f} %", f"{theirs[1]:.3f}", f"{theirs[2]:.3f}"] if theirs else ["–"] * 3
        found = [cell(get("acceptance"), 3, percent=True), cell(get("toxicity")), cell(get("similarity"))]
        counts = f"{plain(get('sequences').value)} of {plain(get('proposals').value)}"
        rows.append([f"β = {beta:g}", counts, *found, *paper])
    head = ["", "Accepted", "Acceptance", "Toxicity", "Similarity", "paper: acceptance", "toxicity", "similarity"]
    caption = (
        "Rejection sampling from Base at three strengths of the potential (paper, Table 1). Acceptance with Wilson’s "
        "interval; similarity of at most "
        f"{study.similarity_samples} samples, with a bootstrap interval."
    )
    picture = figure(
        out / "figures" / "toxicity-histograms.svg",
        "Toxicity of the accepted samples, share of samples on a logarithmic axis (paper, Figure 3). Read the right end: Base "
        "hardly ever writes what σ asks for, and β = 1 still leaves most samples at the left.",
        "Histogram of toxicity for each beta, logarithmic axis.",
    )
    return section("rejection", "Rejection sampling", table(caption, head, rows), picture)


def plane(study: StudyConfig, numbers: Numbers, out: Path) -> tuple[str, str, str]:
    """Similarity against toxicity."""
    picture = figure(
        out / "figures" / "similarity-toxicity.svg",
        "Similarity against toxicity; up and to the left is better, and Target is what a sampler of σ would reach "
        f"(paper, Figure 1). Numbered circles: TSMC generations with K = {study.run.eval.particles}, {over_seeds(study)}; thin "
        "lines: single seeds. Faint points: every run of the baselines’ sweep on the first seed; full ones: the best of each, "
        "over all seeds. Best is the run of the sweep nearest to Target.",
        "Scatter plot of similarity against toxicity.",
    )
    columns = (("toxicity", 3), ("similarity", 3), ("distance", 3), ("log_z_hat_mean", 2), ("log_z_hat_std", 2))
    rows = []
    for m in range(study.run.generations + 1):
        found = [cell(numbers.get("generations", TSMC, "mean", m, q), digits) for q, digits in (*columns, ("ess", 1))]
        found += [cell(numbers.get("generations", TSMC, "mean", m, q), 2) for q in ("distinct", "model_toxicity")]
        rows.append([f"Generation {m}", *found])
    head = [
        "",
        "Toxicity",
        "Similarity",
        "Distance to Target",
        "log Ẑ",
        "(spread)",
        "ESS",
        "Distinct",
        "Toxicity of bare p⁽ᵐ⁾",
    ]
    evidence = numbers.get("rejection", f"beta {study.run.beta:g}", "", "", "log_z")
    caption = f"The generations, {over_seeds(study)}. log Z of σ by rejection: {evidence.value:.2f}."
    return section("plane", "Similarity and toxicity", picture, table(caption, head, rows))


def particles(study: StudyConfig, numbers: Numbers, out: Path) -> tuple[str, str, str]:
    """Toxicity against K."""
    picture = figure(
        out / "figures" / "toxicity-particles.svg",
        f"Toxicity against the number of particles K by generation, {over_seeds(study)}; dashed: Target (paper, Figure 2). "
        "A later generation should lie higher, and most of all at the left.",
        "Line plot of toxicity against the number of particles.",
    )
    rows = []
    for count in study.particle_counts:
        for m in range(study.run.generations + 1):
            get = lambda quantity, k=count, m=m: numbers.get("particles", f"K = {k}", "mean", m, quantity)  # noqa: E731
            found = [
                cell(get("toxicity")),
                cell(get("similarity")),
                cell(get("log_z_hat"), 2),
                cell(get("distinct"), 2),
            ]
            rows.append([f"K = {count}, generation {m}", plain(study.runs_of(count)), *found])
    head = ["", "Runs a seed", "Toxicity", "Similarity", "log Ẑ", "Distinct"]
    return section(
        "particles",
        "Number of particles",
        picture,
        table(f"The points of the figure, {over_seeds(study)}.", head, rows),
    )


def divergence(study: StudyConfig, numbers: Numbers) -> tuple[str, str, str]:
    """KL(sigma||q) by generation beside the paper's."""
    rows = []
    for m in range(study.run.generations + 1):
        single = [cell(numbers.get("generations", TSMC, seed, m, "kl"), 2) for seed in study.seeds]
        theirs = f"{PAPER_KL[m]:.3f}" if m < len(PAPER_KL) else "–"
        rows.append([f"Generation {m}", cell(numbers.get("generations", TSMC, "mean", m, "kl"), 2), *single, theirs])
    for m in range(study.run.generations):
        row = numbers.get("changes", f"generation {m} to {m + 1}", "mean", "", "kl")
        theirs = typeset(f"{PAPER_KL[m + 1] - PAPER_KL[m]:+.3f}") if m + 1 < len(PAPER_KL) else "–"
        single = [numbers.get("changes", row.name, seed, "", "kl") for seed in study.seeds]
        cells = [cell(found, 2, change=True) for found in (row, *single)]
        rows.append([f"Change {m} to {m + 1}", *cells, theirs])
    head = ["", "Mean", *(f"Seed {seed}" for seed in study.seeds), "Paper"]
    caption = (
        "KL(σ‖q) in nats between the target and the twist-induced proposal. Intervals of the mean are over seeds, those of a "
        "seed over the exact samples and log Z. The paper’s values belong to other networks: compare the changes."
    )
    return section("kl", "KL(σ‖q)", table(caption, head, rows))


def ablations(study: StudyConfig, numbers: Numbers) -> tuple[str, str, str]:
    """Effective potential, LoRA, resampling schemes."""
    rows = []
    columns = (
        ("toxicity", 3),
        ("similarity", 3),
        ("kl", 2),
        ("log_z_hat_mean", 2),
        ("model_toxicity", 2),
        ("drift", 2),
    )
    for m in range(study.run.generations + 1):
        for name in (TSMC, WITHOUT, LORA):
            found = [cell(numbers.get("generations", name, "mean", m, q), digits) for q, digits in columns]
            if name != WITHOUT:
                found[-1] = "0"
            rows.append([f"{name}, generation {m}", *found])
    head = ["", "Toxicity", "Similarity", "KL(σ‖q)", "log Ẑ", "Toxicity of bare p⁽ᵐ⁾", "Drift KL(σ‖σ_m)"]
    caption = (
        f"Algorithm 1 as it is, with φ in place of the effective potential φ⁽ᵐ⁾, and with LoRA in place of full distillation, "
        f"{over_seeds(study)}. Generation 0 is the same in all. Drift: how far σ_m ∝ p⁽ᵐ⁾φ, the target of a generation "
        "without φ⁽ᵐ⁾, has left σ; with φ⁽ᵐ⁾ it is 0 by construction. log Ẑ without φ⁽ᵐ⁾ estimates the evidence of σ_m."
    )
    titles = ["", "Toxicity", "Similarity", "log Ẑ", "(spread)", "ESS", "Distinct"]
    words = (
        f"Resampling schemes on the trained pairs, K = {study.run.eval.particles}, {study.resampling_runs} runs a seed, "
        f"{over_seeds(study)}. Learning used multinomial resampling at every step, as the paper does. The last resampling is "
        "drawn in every row."
    )
    return section(
        "ablations",
        "Ablations",
        "<h3>Effective potential and LoRA</h3>",
        table(caption, head, rows),
        "<h3>Resampling</h3>",
        f"<p>{words}</p>",
        *(table(f"Generation {m}", titles, scheme_rows(numbers, m)) for m in range(study.run.generations + 1)),
    )


def scheme_rows(numbers: Numbers, m: int) -> list[list[str]]:
    """The resampling schemes at generation m."""
    kept = (("toxicity", 3), ("similarity", 3), ("log_z_hat", 2), ("log_z_hat_std", 2), ("ess", 1), ("distinct", 2))
    names = dict.fromkeys(key[1] for key in numbers.rows if key[0] == "resampling")
    return [
        [escape(name), *(cell(numbers.get("resampling", name, "mean", m, q), digits) for q, digits in kept)]
        for name in names
    ]


def baselines(study: StudyConfig, numbers: Numbers) -> tuple[str, str, str]:
    """Budgets, the best runs, the sweep."""
    rows = [
        [
            "TSMC, Algorithm 1",
            plain(numbers.get("budget", "TSMC", "", "", "units").value),
            plain(numbers.get("budget", "TSMC", "", "", "scored").value),
            "–",
            "–",
        ]
    ]
    for method in study.methods:
        name = setting_names(numbers, "sweep", method)[0]
        get = lambda quantity, name=name: numbers.get("sweep", name, study.seeds[0], "", quantity).value  # noqa: E731
        rows.append(
            [NAMES[method], *(plain(get(quantity)) for quantity in ("units", "scored", "updates", "batch_size"))]
        )
    budget = table(
        "Equal footing: token positions through the language model (forward and backward together count three), and texts "
        "scored by the classifier, in one run; evaluation is left out.",
        ["", "Token positions", "Texts scored", "Updates", "Batch"],
        rows,
    )
    quantities = (("toxicity", 3), ("similarity", 3), ("kl", 2), ("distance", 3))
    first, lines = study.seeds[0], []
    for method in study.methods:
        for name in setting_names(numbers, "best", method):
            for seed, label in (
                (first, f"seed {first}, chosen on it"),
                ("other seeds", "other seeds"),
                ("mean", "all seeds"),
            ):
                found = [cell(numbers.get("best", name, seed, "", q), digits) for q, digits in quantities]
                lines.append([f"{escape(name)}<small>{label}</small>", *found])
    head = ["", "Toxicity", "Similarity", "KL(σ‖π)", "Distance to Target"]
    best = table(
        "The best of each sweep: chosen on the first seed by the smallest Euclidean distance to Target on the "
        "similarity–toxicity plane. The other seeds were not used for the choice, so they show what choosing was worth.",
        head,
        lines,
    )
    sweep, marked = [], set()
    for method in study.methods:
        names = setting_names(numbers, "sweep", method)
        chosen = setting_names(numbers, "best", method)
        scores = {n: row.value for n in names if (row := numbers.get("sweep", n, first, "", "toxicity")) is not None}
        for name in names:
            if name in chosen:
                marked.add(len(sweep))
            most = " (most toxic)" if scores and name == max(scores, key=scores.get) else ""
            found = [cell(numbers.get("sweep", name, first, "", q), digits) for q, digits in quantities]
            if found[0] == "–":
                found = ["diverged", "–", "–", "–"]
            sweep.append([escape(name) + most, *found])
    whole = table(f"Every run of the sweep, seed {first}; the best of each in bold.", head, sweep, tuple(marked))
    return section(
        "baselines", "Baselines", budget, best, f"<details><summary>The whole sweep</summary>{whole}</details>"
    )


def examples(texts: list[dict]) -> tuple[str, str, str]:
    """Representative texts of every set."""
    note = (
        "<p>Drawn at random without selection. The texts call people ugly, stupid or fat because the target asks for what a "
        "classifier calls toxic; they measure the method and mean nothing else.</p>"
    )
    tables = [text_table(f"{escape(found['set'])}, seed {found['seed']}", found["texts"]) for found in texts]
    return section("texts", "Representative texts", note, *tables)


def making(parts: list[Part], times: dict[str, float], out: Path, command: str) -> tuple[str, str, str]:
    """Command, settings, versions, times."""
    config = read_json(out / "config.json")
    kinds: dict[str, list[float]] = {}
    for part in parts:
        kinds.setdefault(part.kind, []).append(times[part.name])
    rows = [
        [kind, str(len(spent)), f"{sum(spent) / len(spent):.0f} s", f"{max(spent):.0f} s", f"{sum(spent) / 60:.1f} min"]
        for kind, spent in kinds.items()
    ]
    each = [[name, f"{seconds:.0f} s"] for name, seconds in times.items()]
    versions = ", ".join(f"{name} {version}" for name, version in config["versions"].items())
    return section(
        "making",
        "How it was made",
        f"<pre>{escape(command)}</pre><p>{escape(versions)}</p>",
        table("Time of the parts, each a process with one thread.", ["Kind", "Parts", "Mean", "Longest", "Sum"], rows),
        f"<details><summary>Every part</summary>{table('', ['Part', 'Time'], each)}</details>",
        f"<details><summary>config.json</summary><pre>{escape(json.dumps(config, indent=2))}</pre></details>",
    )
