"""The page of the particles: its data is the trace, and it needs nothing but itself."""

import json
import re

import matplotlib.colors
import pytest
import torch
from worlds import generator, table_world

from eval.run.options import POCKET
from eval.viewer import picture
from eval.viewer.draws import Draws, Sequence
from eval.viewer.genealogy import TEMPLATE, page
from tinystories.checkpoint import read_tokenizer
from tsmc import SCHEMES, Trace, tsmc
from tsmc.weights import normalise

K, T = 7, 4
ABOUT = {"run": "r", "generation": 0, "length": T, "particles": K, "seed": 0, "resampling": "x", "ess_threshold": 0.7}


def draws(prompt: str = "Hello", seed: int = 0, scheme: str = "multinomial", ess_threshold: float = 0.7) -> Draws:
    """A population of a table world; its numbers stand for tokens of the pocket vocabulary."""
    model, twist, potential = table_world(3, T, seed=seed)
    trace = Trace()
    population = tsmc(model, twist, potential, K, generator(seed), 1, SCHEMES[scheme], ess_threshold, trace)
    distinct = [Sequence("Hello </script> you", 1.0, K, K, -torch.inf, 0.0)]
    return Draws(prompt, population, trace, distinct, [0])


@pytest.fixture(scope="module")
def tokenizer():
    return read_tokenizer(POCKET / "lm" / "tokenizer.json")


def data_of(text: str) -> dict:
    """The JSON in a page, as a browser finds it."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL).group(1)

    def refuse(constant: str):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(found, parse_constant=refuse)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_samples_weights_and_ess_follow_from_the_data(tokenizer, scheme):
    drawn = draws(scheme=scheme, seed=3)
    data = data_of(page([drawn], ABOUT, tokenizer))["populations"][0]
    rebuilt = []
    for k in data["ancestors"][-1]:  # from a final sample back to its first token
        words = []
        for t in reversed(range(T)):
            words.insert(0, data["vocabulary"][data["tokens"][t][k]])
            k = data["ancestors"][t - 1][k] if t else k
        rebuilt.append("".join(words))
    assert rebuilt == tokenizer.decode_batch(drawn.population.samples[0].tolist(), skip_special_tokens=False)
    weights = normalise(torch.tensor(data["log_weights"]))  # [T, K]
    torch.testing.assert_close(weights[-1], normalise(drawn.population.log_weights[0]).float(), atol=0.01, rtol=0)
    torch.testing.assert_close(1 / weights.square().sum(-1), torch.tensor(data["ess"]), atol=0.1, rtol=0)
    for name in ("log_psi", "log_w"):
        expected = getattr(drawn.trace, name)[:, 0].float()
        torch.testing.assert_close(torch.tensor(data[name]), expected, atol=0.0051, rtol=0)
    assert data["log_z_hat"] == pytest.approx(drawn.population.log_z.item(), abs=1e-3)


def test_the_page_needs_nothing_but_itself(tokenizer):
    text = page([draws()], ABOUT, tokenizer)
    template = TEMPLATE.read_text(encoding="utf-8")
    for banned in ("http:", "https:", "src=", "url(", "@import", "fetch(", "XMLHttpRequest", "WebSocket", "import("):
        assert banned not in text, banned
    assert re.findall(r'href="([^"]*)"', text) == ["data:,"]
    assert "default-src 'none'" in text, "the browser is told to load nothing"
    assert "{{" not in text and template.count("{{data}}") == 1


def test_every_element_that_the_script_asks_for_is_there():
    template = TEMPLATE.read_text(encoding="utf-8")
    asked = set(re.findall(r'\bget\("([\w-]+)"\)', template))
    defined = re.findall(r'\bid="([\w-]+)"', template)
    assert asked and asked <= set(defined) and len(defined) == len(set(defined))


def test_texts_cannot_leave_their_script_element(tokenizer):
    hostile = "</script><script>alert(1)</script><!-- \u2028"
    text = page([draws(hostile)], ABOUT, tokenizer)
    assert text.count("</script>") == TEMPLATE.read_text(encoding="utf-8").count("</script>")
    assert data_of(text)["populations"][0]["prompt"] == hostile


def test_what_is_not_finite_is_null(tokenizer):
    drawn = draws()
    drawn.trace.steps[-1]["log_w"][0, 0] = -torch.inf
    drawn.population.log_z[:] = -torch.inf
    data = data_of(page([drawn], ABOUT, tokenizer))["populations"][0]
    assert data["log_w"][-1][0] is None and data["log_z_hat"] is None and data["distinct"][0][3] is None


def test_every_prompt_has_its_own_particles(tokenizer):
    pages = data_of(page([draws("one", 1), draws("two", 2)], ABOUT, tokenizer))
    assert pages["about"] == ABOUT
    assert [data["prompt"] for data in pages["populations"]] == ["one", "two"]
    assert pages["populations"][0]["tokens"] != pages["populations"][1]["tokens"]


def test_the_picture_follows_one_sample_from_its_first_token(tokenizer, tmp_path, monkeypatch):
    drawn = draws(scheme="systematic", seed=3)
    figures = []
    monkeypatch.setattr(picture, "save_figure", lambda figure, path: figures.append(figure))
    picture.draw_genealogy(drawn, tokenizer, tmp_path / "picture.png")
    axes = figures[0].axes[0]
    sample = drawn.population.samples[0, 0].tolist()
    written = [tokenizer.decode([token], skip_special_tokens=False).strip() for token in sample]
    assert [text.get_text() for text in axes.texts] == written
    line = axes.lines[0].get_ydata().tolist()
    assert line == drawn.trace.lineages()[:, 0, 0].tolist() and len(set(line)) > 1
    survivors = [set(step) for step in drawn.trace.lineages()[:, 0].tolist()]
    alive = matplotlib.colors.to_rgba(picture.ALIVE)
    for dots, kept in zip(axes.collections[1:], survivors, strict=True):
        assert {k for k, colour in enumerate(dots.get_facecolors().tolist()) if tuple(colour) == alive} == kept
