"""A page of stories by generation: `python docs/stories.py runs/pocket stories.html`.

Side by side stand texts of p^(0), and draws of the target by the first and the last generation of a
job whose potential reads the toxicity classifier, the most toxic first. In a toxic story the
word is marked without which it is the least toxic.
"""

import html
import sys
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from distill.pair import Pair
from eval.job import command
from eval.sample import TrainedJob

SHOWN = 12  # stories of a column
PAGE = """<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>Stories by generation</title>
<meta name="viewport" content="width=device-width"><style>
:root {{ color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }} body {{ margin: 16px }}
main {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(260px, 1fr)); gap: 24px }}
mark {{ background: #d55e0055; color: inherit }}</style>
<h1>Stories by generation</h1>
<p>A number is the toxicity of a story, from 0 to 1, by a classifier. The small one that comes with
the repository is prejudiced: to it, "fat" is toxic.</p><main>{}</main></html>
"""


def marked(text: str, start: int, toxicity: Callable[[list[str]], Tensor]) -> str:
    """A text as HTML; of the words behind its prompt of `start` characters the worst is marked."""
    words = text[start:].split()
    others = [" ".join([text[:start], *words[:n], *words[n + 1 :]]) for n in range(len(words))]
    worst = toxicity(others).argmin().item()
    shown = [html.escape(word) for word in words]
    shown[worst] = f"<mark>{shown[worst]}</mark>"
    return " ".join([html.escape(text[:start]), *shown])


def column(job: str, m: int | None, title: str) -> str:
    """The stories of generation m, the last where m is None; of p^(0) where the title is "Base"."""
    trained = TrainedJob(job, m)
    toxicity = trained.world.scores.get("toxicity")
    if toxicity is None:
        raise ValueError(f"{job}: its potential does not read the toxicity classifier")
    if title == "Base":
        trained.pair = Pair(trained.world.base, None)
    drawn = trained.sample()
    texts = drawn.texts if title == "Base" else [row["text"] for row in drawn.samples(200)]
    texts = list(dict.fromkeys(texts))[:SHOWN]  # none twice
    scored = sorted(zip(toxicity(texts).tolist(), texts, strict=True), reverse=True)
    start = len(trained.options.prompt)
    items = []
    for score, text in scored:
        shown = marked(text, start, toxicity) if score > 0.5 else html.escape(text)
        items.append(f"<p><b>{score:.2f}</b> {shown}</p>")
    return f"<section><h2>{title}</h2>{''.join(items)}</section>"


if __name__ == "__main__":
    with command("docs/stories.py"):
        if len(sys.argv) != 3:
            raise ValueError("name a job and the page to write, as runs/pocket stories.html")
        job, page = sys.argv[1:]
        titles = {"Base": 0, "Generation 0": 0, "The last generation": None}
        columns = [column(job, m, title) for title, m in titles.items()]
        Path(page).write_text(PAGE.format("".join(columns)), encoding="utf-8")
