"""The report of a study: report.html, complete in itself, with results.json, results.csv and the figures beside it.

It is made from `eval.numbers` alone, and its claims from `eval.claims`, so it says nothing that the numbers do not.
"""

import json
from html import escape
from pathlib import Path

from eval.paper.numbers import Numbers, collect, write_numbers
from eval.paper.report import figures as paper_figures
from eval.paper.report import sections
from eval.paper.report.page import page, section, table, text_table
from eval.paper.study import Part, StudyConfig
from tinystories.checkpoint import read_json, write_text


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
        f"The experimental section of arXiv:2507.02315 on the <b>{escape(study.run.preset)}</b> preset: seeds {seeds}; "
        f"{study.run.generations} generations after generation 0; β = {study.run.beta:g}. {len(parts)} parts took "
        f"{sum(times.values()) / 60:.0f} minutes of one core, attempts that were interrupted left out. Intervals are 95 %."
    )
    folder = out / "figures"
    content = [
        sections.summary(study, numbers),
        sections.rejection(study, numbers, folder),
        sections.plane(study, numbers, folder),
        sections.particles(study, numbers, folder),
        sections.divergence(study, numbers),
        sections.ablations(study, numbers),
        sections.baselines(study, numbers),
        examples(texts),
        making(parts, times, out, command),
    ]
    footer = "Every number of this page is in <code>results.csv</code> and <code>results.json</code> beside it."
    return page("Self-distilled twisted SMC: the study", lead, content, footer)


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
