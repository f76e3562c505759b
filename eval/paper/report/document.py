"""The report of a study: report.html, complete in itself, with results.json, results.csv and the figures beside it.

What it shows is computed in `numbers.py` and `claims.py`; its words and tables are in the templates of this folder.
"""

import base64
import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eval.paper.claims import VERDICTS, is_mostly_gone, verb, verdict
from eval.paper.numbers import QUANTITIES, Number, Numbers, collect, own_scheme, write_results
from eval.paper.report.figures import draw
from eval.paper.study import NAMES, NEVER, Part, StudyConfig
from tinystories.checkpoint import read_json, write_text

IN_PERCENT = ("acceptance", "toxic_share", "twist_share")


def write_report(study: StudyConfig, parts: list[Part], out: Path, command: str) -> None:
    """results.json, results.csv, figures and report.html of a study whose parts have all finished."""
    numbers, texts = collect(study, parts, out)
    write_results(numbers, texts, out)
    draw(study, numbers, out)
    times = {part.name: read_json(out / "times" / f"{part.name}.json")["seconds"] for part in parts}
    by_kind: dict[str, list[float]] = {}
    for part in parts:
        by_kind.setdefault(part.kind, []).append(times[part.name])
    content = {
        "texts": texts,
        "images": {path.stem: base64.b64encode(path.read_bytes()).decode() for path in (out / "figures").glob("*.svg")},
        "command": command,
        "config": read_json(out / "config.json"),
        "times": times,
        "by_kind": by_kind,
    }
    write_text(out / "report.html", templates(study, numbers).get_template("report.html").render(content))


def templates(study: StudyConfig, numbers: Numbers) -> Environment:
    """The templates, with access to the study and its numbers; whatever they print is escaped."""
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"visible": visible, "titles": lambda names: [QUANTITIES[name].title for name in names]}
    environment.globals |= {"study": study, "numbers": numbers, "names": NAMES, "never": NEVER, "verdicts": VERDICTS}
    environment.globals |= {"own_scheme": own_scheme(study), "shown": shown}
    environment.globals |= {"verdict": verdict, "verb": verb, "is_mostly_gone": is_mostly_gone}
    environment.globals["steps"] = [f"generation {m} to {m + 1}" for m in range(study.run.generations)]
    environment.globals["seed_heads"] = [f"Seed {seed}" for seed in study.seeds]
    return environment


def shown(number: Number | None, sign: str = "", digits: int | None = None) -> tuple[str, str]:
    """A number and its interval, a dash where there is none; sign "+" marks a change, which shows its sign always."""
    if number is None or number.value is None:
        return "–", ""
    digits = QUANTITIES[number.quantity].digits if digits is None else digits
    form, factor = f"{sign}{'' if digits else ','}.{digits}f", 100 if number.quantity in IN_PERCENT else 1
    limits = number.value, number.low, number.high
    value, low, high = (None if limit is None else typeset(format(factor * limit, form)) for limit in limits)
    return value, "" if low is None or low == high else f"{low} to {high}"


def typeset(text: str) -> str:
    """Numbers with a proper minus sign, and none before zero."""
    return re.sub(r"(?<![\w.])-(?=\d)", "−", re.sub(r"(?<![\w.])-(?=0\.?0*(?![.\d]))", "", text))


def visible(text: str) -> str:
    """Line breaks and other control characters as they are written in code."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
