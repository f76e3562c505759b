"""Pieces of the report's HTML: tables, figures, numbers with their intervals. Everything is escaped here and only here."""

import base64
import re
from html import escape
from pathlib import Path
from string import Template

from eval.numbers import Number

HERE = Path(__file__).parent


def cell(row: Number | None, digits: int = 3, percent: bool = False, change: bool = False) -> str:
    """A number (a change with its sign), its interval in small under it; a dash where there is none."""
    if row is None or row.value is None:
        return "–"

    factor, sign = (100, "") if percent else (1, "+" if change else "")
    value, low, high = (None if v is None else f"{factor * v:{sign}.{digits}f}" for v in (row.value, row.low, row.high))
    text = f"{value} %" if percent else value
    return typeset(text if low is None or high is None else f"{text}<small>{low} to {high}</small>")


def typeset(text: str) -> str:
    """Numbers with a proper minus sign, and none before zero."""
    return re.sub(r"(?<![\w.])-(?=\d)", "−", re.sub(r"(?<![\w.])-(?=0\.?0*(?![.\d]))", "", text))


def plain(value: float | int | None, digits: int | None = None) -> str:
    """A number without an interval; thousands set apart by commas where it counts something."""
    if value is None:
        return "–"
    return f"{value:,}" if digits is None else f"{value:.{digits}f}"


def table(caption: str, head: list[str], rows: list[list[str]], marked: tuple[int, ...] = ()) -> str:
    """A table that scrolls where it is too wide; the first cell of a row heads it, cells are HTML, `marked` rows are bold."""
    titles = "".join(f'<th scope="col">{title}</th>' for title in head)
    lines = []
    for place, (first, *others) in enumerate(rows):
        mark = ' class="marked"' if place in marked else ""
        cells = "".join(item if item.startswith("<td") else f"<td>{item}</td>" for item in others)
        lines.append(f'<tr{mark}><th scope="row">{first}</th>{cells}</tr>')
    body = "\n".join(lines)
    note = f"<caption>{caption}</caption>" if caption else ""
    return f'<div class="scroll"><table>{note}<thead><tr>{titles}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def text_table(caption: str, rows: list[dict]) -> str:
    """Texts with their toxicity."""
    lines = [[f"{row['toxicity']:.4f}", f'<td class="text">{escape(visible(row["text"]))}</td>'] for row in rows]
    return table(caption, ["Toxicity", '<span class="text">Text</span>'], lines)


def visible(text: str) -> str:
    """Line breaks and other control characters as they are written in code."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def figure(path: Path, caption: str, words: str) -> str:
    """A figure embedded as SVG; `words` describe it to those who cannot see it."""
    data = base64.b64encode(path.read_bytes()).decode()
    image = f'<img alt="{escape(words, quote=True)}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def section(anchor: str, title: str, *content: str) -> tuple[str, str, str]:
    """Anchor, title and HTML of a section."""
    inner = "\n".join(content)
    return anchor, title, f'<section id="{anchor}"><h2>{title}</h2>\n{inner}\n</section>'


def page(title: str, lead: str, sections: list[tuple[str, str, str]], footer: str) -> str:
    """The whole document."""
    return Template((HERE / "report.html").read_text(encoding="utf-8")).substitute(
        title=title,
        style=(HERE / "report.css").read_text(encoding="utf-8"),
        lead=lead,
        contents="\n".join(f'<a href="#{anchor}">{name}</a>' for anchor, name, _ in sections),
        sections="\n".join(content for _, _, content in sections),
        footer=footer,
    )
