"""The page of the particles: its data is the trace, and it needs nothing but itself."""

import json
import re

import pytest
import torch
from worlds import generator, table_world

from eval.run.options import POCKET
from eval.viewer import explainer, picture
from eval.viewer.genealogy import TEMPLATE, page
from tinystories.tokenizer import read_tokenizer
from tsmc import SCHEMES, Trace, tsmc
from tsmc.resampling import normalise
from twist import Drawn

K, T = 7, 4
ABOUT = {"run": "r", "runs": 1, "prompt": "Hello", "length": T, "particles": K, "seed": 0}
ABOUT |= {"resampling": "x", "ess_threshold": 0.7, "potential": ["y"]}
HTML = TEMPLATE.read_text(encoding="utf-8")
TOKENIZER = read_tokenizer(POCKET / "lm", 4096)


def draws(seed: int = 0, scheme: str = "multinomial", ess_threshold: float = 0.7) -> Drawn:
    """A population of a table world; its numbers stand for tokens of the pocket vocabulary."""
    model, twist, potential = table_world(3, T, seed=seed)
    trace = Trace()
    rule = (SCHEMES[scheme], ess_threshold, trace)
    population = tsmc(model, twist, potential, K, generator(seed), 1, *rule)
    scores = {"log_phi": population.log_phi[0], "toxicity": torch.arange(K) / K}
    weights = population.shares().flatten().log()
    return Drawn([], scores, weights, population.log_mean_z(), population, trace, seed)


def data_of(text: str) -> dict:
    pattern = r'<script type="application/json" id="data">(.*?)</script>'
    return json.loads(re.search(pattern, text, re.DOTALL).group(1), parse_constant=pytest.fail)


@pytest.mark.parametrize("ess_threshold", [0.0, 0.7, 1.0])
def test_a_node_is_a_prefix_with_its_particles(ess_threshold):
    drawn = draws(3, "systematic", ess_threshold)
    trace = drawn.trace
    (data,) = data_of(page({0: drawn}, ABOUT, TOKENIZER, None))["populations"]
    texts, prefixes = [""], torch.empty(K, 0, dtype=torch.long)
    for t, nodes in enumerate(data["nodes"]):
        prefixes = prefixes[trace.ancestors[t - 1, 0]] if t > 0 else prefixes
        prefixes = torch.cat([prefixes, trace.tokens[t, 0, :, None]], 1)  # [K, t]
        words = TOKENIZER.decode_batch(prefixes.tolist(), skip_special_tokens=False)
        texts = [texts[parent] + token for parent, token, *_ in nodes]
        assert sorted(texts) == sorted(set(words))
        assert [node[0] for node in nodes] == sorted(node[0] for node in nodes)
        shares = normalise(trace.log_weights[t, 0])
        lines = trace.lineages()[t, 0].tolist()
        for text, node in zip(texts, nodes, strict=True):
            own = [k for k, word in enumerate(words) if word == text]
            one = [values[t, 0, own[0]].item() for values in (trace.log_psi, trace.log_w)]
            wanted = [len(own), *one, shares[own].sum().item(), sum(k in own for k in lines)]
            assert node[2:] == pytest.approx(wanted, abs=0.0051)
    ends = [words.index(text) for text in texts]
    log_phi = drawn.scores["log_phi"][ends].tolist()
    assert data["scores"]["log_phi"] == pytest.approx(log_phi, abs=0.0051)
    assert len(data["scores"]["toxicity"]) == len(ends)
    assert data["ess"] == pytest.approx(trace.ess[:, 0].tolist(), rel=0.01)
    assert data["log_z_hat"] == pytest.approx(trace.log_z[:, 0].tolist(), abs=1e-3)
    assert data["log_z_hat"][-1] == pytest.approx(drawn.log_z_hat, abs=1e-3)


@pytest.mark.parametrize("path", [TEMPLATE, explainer.PAGE], ids=lambda path: path.stem)
def test_a_page_needs_nothing_but_itself(path):
    text = path.read_text(encoding="utf-8")
    for banned in ("http:", "https:", "src=", "url(", "@import", "fetch(", "WebSocket", "import("):
        assert banned not in text, banned
    assert "default-src 'none'" in text


def test_texts_cannot_leave_their_script_element():
    hostile = "</script><script>alert(1)</script><!-- \u2028"
    text = page({0: draws()}, ABOUT | {"prompt": hostile}, TOKENIZER, -7.5)
    assert text.count("</script>") == HTML.count("</script>") and "\u2028" not in text
    data = data_of(text)
    assert data["about"] == ABOUT | {"prompt": hostile} and "{{" not in text
    assert data["log_z_sigma"] == -7.5 and len(data["populations"]) == 1


def test_the_picture_follows_the_best_sample_and_shows_phi(tmp_path, monkeypatch):
    drawn = draws(seed=3, scheme="systematic")
    figures = []
    monkeypatch.setattr(picture, "save_figure", lambda figure, path: figures.append(figure))
    lines = drawn.trace.lineages()[:, 0]  # [T, K]
    log_phi = drawn.scores["log_phi"][: lines.shape[1]]
    picture.draw_genealogy(drawn.trace, log_phi, TOKENIZER, tmp_path / "picture.png")
    axes, bars = figures[0].axes
    best = log_phi[lines[-1]].argmax().item()
    sample = drawn.population.samples[0, best].tolist()
    written = [TOKENIZER.decode([token], skip_special_tokens=False).strip() for token in sample]
    assert [text.get_text() for text in axes.texts] == written
    assert list(axes.lines[-1].get_ydata()) == [*lines[:, best].tolist(), best]
    widths = torch.tensor([bar.get_width() for bar in bars.patches])
    relative = log_phi - log_phi.max()
    assert widths.log().tolist() == pytest.approx(relative.tolist(), abs=1e-5)
