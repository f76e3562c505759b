"""Pieces of the report's HTML: tables, figures, numbers with their intervals. Everything is escaped here and only here."""

import base64
import re
from html import escape
from pathlib import Path
from string import Template

from eval.paper.numbers import Number

HERE = Path(__file__).parent


def cell(row: Number | None, digits: int = 3, factor: int = 1, sign: str = "") -> str:
    """A number times `factor`, its interval in small under it; a dash where there is none. Whole numbers have commas.

    sign "+" marks a change, which shows its sign always.
    """
    if row is None or row.value is None:
        return "–"
    form = f"{sign}{'' if digits else ','}.{digits}f"
    value, low, high = (None if v is None else format(factor * v, form) for v in (row.value, row.low, row.high))
    return typeset(value if low is None or low == high else f"{value}<small>{low} to {high}</small>")


def typeset(text: str) -> str:
    """Numbers with a proper minus sign, and none before zero."""
    return re.sub(r"(?<![\w.])-(?=\d)", "−", re.sub(r"(?<![\w.])-(?=0\.?0*(?![.\d]))", "", text))


def table(caption: str, head: list[str], rows: list[list[str]], marked: tuple[int, ...] = ()) -> str:
    """A table that scrolls where it is too wide; the first cell of a row heads it, cells are HTML, `marked` rows are bold."""
    titles = "".join(f'<th scope="col">{title}</th>' for title in head)
    lines = []
    for place, (first, *others) in enumerate(rows):
        mark = ' class="marked"' if place in marked else ""
        cells = "".join(item if item.startswith("<td") else f"<td>{item}</td>" for item in others)
        lines.append(f'<tr{mark}><th scope="row">{first}</th>{cells}</tr>')
    body = "\n".join(lines)
    note = f'<p class="caption">{caption}</p>' if caption else ""
    return f'{note}<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


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
