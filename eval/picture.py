"""The particles of one run of twisted SMC as an HTML page: token by token, weight by weight.

A row is the sentence of a particle, a column a step t. The colour of a token is the weight W_k of
its particle at that step, beside the mean 1 / K, before the run resamples. A cell that spans
several rows is a common ancestor; one without descendants is struck through. At the end each
sentence has its toxicity where the potential reads it, else its log phi.
"""

import json
from pathlib import Path

import torch

from distill import Pair
from eval.world import World
from tinystories.files import write_text
from tsmc import Rule, Streams, lineages, tsmc
from tsmc.draws import normalise
from tsmc.sampler import Step
from tsmc.sigma import seen_from


def draw_picture(
    path: Path, title: str, world: World, pair: Pair, count: int, rule: Rule, seed: int
) -> None:
    """Write the page of a run of K = count particles of (p^(m), psi^(m)), with a title."""
    trace: list[Step] = []
    sigma = seen_from(pair.model, world.base, world.potential)
    generator = Streams(seed, world.base.prompt.device).stream("picture")
    population = tsmc(sigma, pair.twist, count, generator, 1, rule, trace)
    particles = torch.arange(count, device=generator.device)[None]  # [1, K]
    steps = []
    for t, step in enumerate(trace, 1):
        # Of each particle of step t: which ones of the steps before it descends from, and itself.
        lines = torch.cat([lineages(trace[: t - 1])[:, 0], particles]) if t > 1 else particles
        tokens = torch.stack([trace[u].tokens[0, lines[u]] for u in range(t)], 1)  # [K, t]
        texts, begun = (world.potential.texts(rows) for rows in (tokens, tokens[:, :-1]))
        steps.append({
            "lines": lines.tolist(),
            "pieces": [text[len(start) :] for text, start in zip(texts, begun, strict=True)],
            "weights": normalise(step.log_weights[0]).tolist(),
            "children": step.ancestors[0].bincount(minlength=count).tolist(),
            "said": f"ESS {step.ess.item():.1f} of {count}, log Z-hat {step.log_z.item():.2f}",
        })  # fmt: skip
    prompt = world.potential.texts(population.tokens[0, :1, :0])[0]
    data = {"steps": steps, "samples": lineages(trace)[:, 0].tolist(), "prompt": prompt}
    scored = world.score(population.tokens[0])
    name = "toxicity" if "toxicity" in scored.scores else "log phi"
    data |= {"title": title, "scores": [f"{name} {score:.2f}" for score in scored.score.tolist()]}
    # No text can end the script that holds it.
    write_text(path, PAGE.replace("DATA", json.dumps(data).replace("<", "\\u003c")))


PAGE = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>Particles of one run</title><style>
body { font: 14px/1.4 system-ui, sans-serif; margin: 1em; color: #222; background: #fff }
#bar { display: flex; gap: .8em; align-items: center; flex-wrap: wrap; position: sticky; top: 0;
  background: #fff; padding: .4em 0 } #bar input { flex: 1; min-width: 10em; max-width: 40em }
#wide { overflow-x: auto } table { border-collapse: collapse } p { max-width: 60em }
td { border: 1px solid #ddd; padding: 0 .35em; white-space: pre; height: 1.45em }
.lost { text-decoration: line-through } .score { color: #555 }
.key { padding: 0 .5em; border: 1px solid #ddd; white-space: nowrap }
</style><h3 id="prompt"></h3><p id="title"></p><div id="bar"><button id="play">Play</button>
<input id="t" type="range" min="1" aria-label="step"><span id="said"></span></div>
<p>A row is the sentence of a particle, a column a step. Colour is a particle's weight at that step:
<span class="key" style="background:rgb(86,180,233)">1/8 of the mean or less</span>
<span class="key">the mean</span>
<span class="key" style="background:rgb(230,159,0)">8 times or more</span>. A cell over several rows
is their common ancestor; one that resampling has not drawn is struck through, and × 3 means that it
was drawn three times. ESS is how many particles of equal weight they are worth, log Z-hat their
estimate of how probable the test is.</p>
<div id="wide"><table></table></div><script>
const data = DATA, steps = data.steps, last = steps.length + 1;
const [prompt, play, t, said, table] =
  ["#prompt", "#play", "#t", "#said", "table"].map(name => document.querySelector(name));
prompt.textContent = data.prompt + " …";
document.querySelector("#title").textContent = data.title;
t.max = last;
function draw() {
  const now = +t.value, step = steps[Math.min(now, last - 1) - 1];
  const lines = now == last ? data.samples : step.lines;
  const rows = [...lines[0].keys()].sort((a, b) => {  // relatives side by side
    const fork = lines.find(line => line[a] != line[b]);
    return fork ? fork[a] - fork[b] : 0;
  });
  said.textContent = now == last ? "resampled: the samples" : `step ${now}: ${step.said}`;
  table.replaceChildren(...rows.map((k, r) => {
    const tr = document.createElement("tr");
    lines.forEach((line, u) => {
      if (r > 0 && line[rows[r - 1]] == line[k]) return;  // in the cell above
      const td = tr.insertCell(), own = steps[u];
      const x = Math.log2(own.weights[line[k]] * rows.length);  // above the mean or below it
      const end = rows.findIndex((other, place) => place > r && line[other] != line[k]);
      td.rowSpan = (end < 0 ? rows.length : end) - r;
      const copies = u == last - 2 && td.rowSpan > 1 ? ` × ${td.rowSpan}` : "";
      td.textContent = (own.pieces[line[k]] || "∎") + copies;
      td.className = own.children[line[k]] ? "" : "lost";
      const share = Math.min(Math.abs(x) / 3, 1);
      td.style.background = `rgba(${x > 0 ? "230,159,0" : "86,180,233"},${share})`;
      td.title = `W = ${own.weights[line[k]].toPrecision(2)}, ${own.children[line[k]]} copies`;
    });
    if (lines.length == last - 1) {  // whole sentences
      const textContent = data.scores[lines[last - 2][k]];
      Object.assign(tr.insertCell(), { className: "score", textContent });
    }
    return tr;
  }));
}
let timer = 0;
play.onclick = () => {
  const stop = () => { clearInterval(timer); timer = 0; play.textContent = "Play"; };
  if (timer) return stop();
  if (t.value >= last - 1) { t.value = 1; draw(); }
  play.textContent = "Pause";
  timer = setInterval(() => { t.value = +t.value + 1; draw(); if (t.value == last) stop(); }, 700);
};
t.oninput = draw;
t.value = +location.hash.slice(1) || last;  // page.html#3 opens at step 3
draw();
</script></html>
"""
