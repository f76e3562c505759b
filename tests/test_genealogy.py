"""The page of the particles: its data is the trace, and it needs nothing but itself."""

import json
import re

import pytest
import torch
from worlds import generator, table_world

from eval.run.options import POCKET
from eval.run.trained import Drawn
from eval.viewer import explainer, picture
from eval.viewer.genealogy import TEMPLATE, page
from tinystories.tokenizer import read_tokenizer
from tsmc import SCHEMES, Trace, tsmc

K, T = 7, 4
ABOUT = {"run": "r", "runs": 1, "prompt": "Hello", "length": T, "particles": K, "seed": 0}
ABOUT |= {"resampling": "x", "ess_threshold": 0.7}
HTML = TEMPLATE.read_text(encoding="utf-8")


def draws(seed: int = 0, scheme: str = "multinomial", ess_threshold: float = 0.7) -> Drawn:
    """A population of a table world; its numbers stand for tokens of the pocket vocabulary."""
    model, twist, potential = table_world(3, T, seed=seed)
    trace = Trace()
    rule = (SCHEMES[scheme], ess_threshold, trace)
    population = tsmc(model, twist, potential, K, generator(seed), 1, *rule)
    log_phi, score = population.log_phi[0], torch.arange(K) / K
    weights = population.shares().flatten().log()
    return Drawn([], log_phi, score, weights, population.log_mean_z(), population, trace)


@pytest.fixture(scope="module")
def tokenizer():
    return read_tokenizer(POCKET / "lm", 4096)


def data_of(text: str) -> dict:
    pattern = r'<script type="application/json" id="data">(.*?)</script>'
    return json.loads(re.search(pattern, text, re.DOTALL).group(1), parse_constant=pytest.fail)


def population_of(drawn: Drawn, tokenizer) -> dict:
    return data_of(page({0: drawn}, ABOUT, tokenizer, None))["populations"][0]


@pytest.mark.parametrize("ess_threshold", [0.0, 0.7, 1.0])
def test_samples_weights_and_estimates_follow_from_the_data(tokenizer, ess_threshold):
    drawn = draws(3, "systematic", ess_threshold)
    data = population_of(drawn, tokenizer)
    rebuilt = []
    for parent, token, *_, final in data["nodes"][-1]:  # back to the first token
        words = [token]
        for step in reversed(data["nodes"][:-1]):
            parent, token, *_ = step[parent]
            words.insert(0, token)
        rebuilt += ["".join(words)] * final
    samples = drawn.population.samples[0].tolist()
    assert sorted(rebuilt) == sorted(tokenizer.decode_batch(samples, skip_special_tokens=False))
    for t, step in enumerate(data["nodes"]):
        counts, shares = torch.tensor([[node[2], node[5]] for node in step]).T
        assert shares.sum().item() == pytest.approx(1, abs=1e-3)
        ess = 1 / (shares.square() / counts).sum().item()
        assert ess == pytest.approx(data["ess"][t], rel=0.01)
    first = drawn.trace.log_w[0].exp().mean().log().item()
    assert data["log_z_hat"][0] == pytest.approx(first, abs=1e-3)
    assert data["log_z_hat"][T - 1] == pytest.approx(drawn.log_z_hat, abs=1e-3)


def test_identical_particles_are_merged_with_their_count(tokenizer):
    drawn = draws(seed=3, ess_threshold=1.0)
    data = population_of(drawn, tokenizer)
    trace, prefixes = drawn.trace, torch.empty(0, K, dtype=torch.long)
    for t, nodes in enumerate(data["nodes"]):
        if t > 0:
            prefixes = prefixes[:, trace.ancestors[t - 1, 0]]
        prefixes = torch.cat([prefixes, trace.tokens[t]])  # [t, K]
        distinct, place, count = prefixes.unique(dim=1, return_inverse=True, return_counts=True)
        members = [place.tolist().index(n) for n in range(distinct.shape[1])]
        wanted = torch.stack([count, trace.log_psi[t, 0, members], trace.log_w[t, 0, members]])
        found = torch.tensor([node[2:5] for node in nodes]).T.double()
        found, wanted = (x.sort(-1).values for x in (found, wanted))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0.0051)
        parents = [node[0] for node in nodes]
        assert parents == sorted(parents) and sum(node[-1] for node in nodes) == K
    log_phi = sorted(drawn.log_phi[members].tolist())
    assert sorted(data["log_phi"]) == pytest.approx(log_phi, abs=0.0051)
    assert len(data["score"]) == len(nodes)


@pytest.mark.parametrize("path", [TEMPLATE, explainer.PAGE], ids=lambda path: path.stem)
def test_a_page_needs_nothing_but_itself(path):
    text = path.read_text(encoding="utf-8")
    for banned in ("http:", "https:", "src=", "url(", "@import", "fetch(", "WebSocket", "import("):
        assert banned not in text, banned
    assert "default-src 'none'" in text


def test_texts_cannot_leave_their_script_element(tokenizer):
    hostile = "</script><script>alert(1)</script><!-- \u2028"
    text = page({0: draws()}, ABOUT | {"prompt": hostile}, tokenizer, -7.5)
    assert text.count("</script>") == HTML.count("</script>") and "\u2028" not in text
    data = data_of(text)
    assert data["about"] == ABOUT | {"prompt": hostile} and "{{" not in text
    assert data["log_z_sigma"] == -7.5 and len(data["populations"]) == 1


def test_what_is_not_finite_is_null(tokenizer):
    drawn = draws()
    last = drawn.trace.steps[-1]
    for values in (last["log_w"], last["log_z"], drawn.log_phi):
        values[:] = -torch.inf
    data = population_of(drawn, tokenizer)
    assert data["log_w"][-1] == [None] * 5 and data["log_z_hat"][-1] is None
    assert set(data["log_phi"]) == {None} and all(node[4] is None for node in data["nodes"][-1])


def test_the_picture_follows_one_sample_from_its_first_token(tokenizer, tmp_path, monkeypatch):
    drawn = draws(seed=3, scheme="systematic")
    figures = []
    monkeypatch.setattr(picture, "save_figure", lambda figure, path: figures.append(figure))
    picture.draw_genealogy(drawn.trace, tokenizer, tmp_path / "picture.png")
    (axes,) = figures[0].axes
    sample = drawn.population.samples[0, 0].tolist()
    written = [tokenizer.decode([token], skip_special_tokens=False).strip() for token in sample]
    assert [text.get_text() for text in axes.texts] == written
    line = axes.lines[-1].get_ydata()
    lineages = drawn.trace.lineages()[:, 0].tolist()
    assert list(line) == [step[0] for step in lineages] and len(set(line)) > 1
