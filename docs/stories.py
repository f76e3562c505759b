"""A page of stories by generation: `python docs/stories.py runs/pocket stories.html`.

Side by side stand texts of p^(0), and draws of the target by the first and the last generation of a
job whose potential reads the toxicity classifier, the most toxic first. In a toxic story the
word is marked without which it is the least toxic. A title says how rare draws that pass are.
"""

import html
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from eval.job import command
from eval.sample import TrainedJob
from tsmc.draws import log_mean_exp
from tsmc.proposal import sample_proposal

SHOWN = 12  # stories of a column
DRAWS = 2000  # of a proposal, for how many pass
PAGE = """<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>Stories by generation</title>
<meta name="viewport" content="width=device-width"><style>
:root {{ color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }} body {{ margin: 16px }}
h2 {{ font-size: 1.1rem }}
main {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(260px, 1fr)); gap: 24px }}
mark {{ background: #d55e0055; color: inherit }}</style>
<h1>Stories by generation</h1>
<p>A number is the toxicity of a story, from 0 to 1, by a classifier. The small one that comes with
the repository is prejudiced: to it, "fat" is toxic. Stories of generations are drawn by weight.</p>
<main>{}</main></html>
"""


def marked(text: str, start: int, toxicity: Callable[[list[str]], Tensor]) -> str:
    """A text as HTML; of the words behind its prompt of `start` characters the worst is marked."""
    words = text[start:].split()
    others = [" ".join([text[:start], *words[:n], *words[n + 1 :]]) for n in range(len(words))]
    worst = toxicity(others).argmin().item()
    shown = [html.escape(word) for word in words]
    shown[worst] = f"<mark>{shown[worst]}</mark>"
    return " ".join([html.escape(text[:start]), *shown])


def column(trained: TrainedJob, title: str, texts: list[str]) -> str:
    """The first texts that differ, as HTML, the most toxic first."""
    toxicity = trained.world.scores["toxicity"]
    texts = list(dict.fromkeys(texts))[:SHOWN]
    scored = sorted(zip(toxicity(texts).tolist(), texts, strict=True), reverse=True)
    start = len(trained.options.prompt)
    items = []
    for score, text in scored:
        shown = marked(text, start, toxicity) if score > 0.5 else html.escape(text)
        items.append(f"<p><b>{score:.2f}</b> {shown}</p>")
    return f"<section><h2>{title}</h2>{''.join(items)}</section>"


def rarity(trained: TrainedJob, generator: torch.Generator) -> float:
    """Of how many draws of the proposal one passes: 1 / E_q[phi], by DRAWS of them."""
    pair = trained.pair
    drawn = sample_proposal(pair.model, pair.twist, DRAWS, generator)
    return math.exp(-log_mean_exp(trained.world.potential(drawn.tokens)).item())


if __name__ == "__main__":
    with command("docs/stories.py"):
        if len(sys.argv) != 3:
            raise ValueError("name a job and the page to write, as runs/pocket stories.html")
        job, page = sys.argv[1:]
        first, last = TrainedJob(job, 0), TrainedJob(job)
        world = first.world
        if "toxicity" not in world.scores:
            raise ValueError(f"{job}: its potential does not read the toxicity classifier")
        generator = torch.Generator(world.base.prompt.device).manual_seed(first.options.seed)
        plain = sample_proposal(world.base, None, SHOWN, generator).tokens
        columns = [column(first, "Base", world.potential.texts(plain))]
        for trained, title in ((first, "Generation 0"), (last, "The last generation")):
            title += f": one draw in {rarity(trained, generator):,.0f} passes"
            texts = [row["text"] for row in trained.sample().samples(200)]
            columns.append(column(trained, title, texts))
        Path(page).write_text(PAGE.format("".join(columns)), encoding="utf-8")
