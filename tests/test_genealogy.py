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

K, T = 7, 4
ABOUT = {"run": "r", "runs": 1, "length": T, "particles": K, "seed": 0, "resampling": "x", "ess_threshold": 0.7}


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
    data = data_of(page({0: [drawn]}, ABOUT, tokenizer, {}))["populations"][0]
    rebuilt = []
    for parent, token, *_, final in data["nodes"][-1]:  # from final samples back to their first token
        words = [data["vocabulary"][token]]
        for step in reversed(data["nodes"][:-1]):
            parent, token, *_ = step[parent]
            words.insert(0, data["vocabulary"][token])
        rebuilt += ["".join(words)] * final
    assert sorted(rebuilt) == sorted(
        tokenizer.decode_batch(drawn.population.samples[0].tolist(), skip_special_tokens=False)
    )
    for t, step in enumerate(data["nodes"]):
        counts, shares = torch.tensor([[count, share] for _, _, count, _, _, share, _ in step]).T
        assert shares.sum().item() == pytest.approx(1, abs=1e-3)
        assert (shares.square() / counts).sum().item() == pytest.approx(1 / data["ess"][t], rel=0.01)


def test_identical_particles_are_merged_with_their_count(tokenizer):
    drawn = draws(seed=3, ess_threshold=1.0)
    nodes = data_of(page({0: [drawn]}, ABOUT, tokenizer, {}))["populations"][0]["nodes"]
    trace, lines = drawn.trace, torch.arange(K)[None]
    for t in range(T):
        lines = (
            torch.arange(K)[None] if t == 0 else torch.cat([lines[:, trace.ancestors[t - 1, 0]], torch.arange(K)[None]])
        )
        prefixes = trace.tokens[: t + 1, 0].gather(1, lines).T.tolist()  # [K, t]
        merged = {tuple(prefix): k for k, prefix in enumerate(prefixes)}
        assert [node[0] for node in nodes[t]] == sorted(node[0] for node in nodes[t]), "in the order of the parents"
        assert sum(node[2] for node in nodes[t]) == sum(node[-1] for node in nodes[t]) == K
        assert sorted(node[2] for node in nodes[t]) == sorted(prefixes.count(list(prefix)) for prefix in merged)
        for name, place in (("log_psi", 3), ("log_w", 4)):
            values = getattr(trace, name)[t, 0]
            assert all(torch.allclose(values[k], values[merged[tuple(prefix)]]) for k, prefix in enumerate(prefixes))
            wanted = sorted(values[k].item() for k in merged.values())
            assert sorted(node[place] for node in nodes[t]) == pytest.approx(wanted, abs=0.0051)
    assert any(node[2] > 1 for step in nodes for node in step) and len(nodes[0]) <= 3


@pytest.mark.parametrize("ess_threshold", [0.0, 1.0])
def test_log_z_hat_runs_until_it_is_the_population_s(tokenizer, ess_threshold):
    drawn = draws(seed=3, ess_threshold=ess_threshold)
    data = data_of(page({0: [drawn]}, ABOUT, tokenizer, {"Hello": -7.5}))["populations"][0]
    assert len(data["log_z_hat"]) == T and data["log_z_sigma"] == -7.5
    assert data["log_z_hat"][-1] == pytest.approx(drawn.population.log_mean_z(), abs=1e-3)
    assert data["log_z_hat"][0] == pytest.approx(drawn.trace.log_w[0].exp().mean().log().item(), abs=1e-3)


def test_every_generation_has_its_own_particles_of_every_prompt(tokenizer):
    drawn = {m: [draws("one", 2 * m), draws("two", 2 * m + 1)] for m in (0, 2)}
    data = data_of(page(drawn, ABOUT, tokenizer, {"two": -1.0}))
    shown = [(one["generation"], one["prompt"], one["log_z_sigma"]) for one in data["populations"]]
    assert shown == [(0, "one", None), (0, "two", -1.0), (2, "one", None), (2, "two", -1.0)]
    assert data["about"] == ABOUT
    assert len({json.dumps(one["nodes"]) for one in data["populations"]}) == 4


def test_the_page_needs_nothing_but_itself(tokenizer):
    text = page({0: [draws()]}, ABOUT, tokenizer, {})
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
    assert set(re.findall(r'aria-describedby="([\w-]+)"', template)) <= set(defined), "every term is in the glossary"
    classes = {name for names in re.findall(r'class="([\w -]+)"', template) for name in names.split()}
    assert set(re.findall(r'\bpart\(\w+, "([\w-]+)"\)', template)) <= classes


def test_texts_cannot_leave_their_script_element(tokenizer):
    hostile = "</script><script>alert(1)</script><!-- \u2028"
    text = page({0: [draws(hostile)]}, ABOUT, tokenizer, {})
    assert text.count("</script>") == TEMPLATE.read_text(encoding="utf-8").count("</script>")
    assert data_of(text)["populations"][0]["prompt"] == hostile


def test_what_is_not_finite_is_null(tokenizer):
    drawn = draws()
    drawn.trace.steps[-1]["log_w"][:] = -torch.inf
    drawn.trace.steps[-1]["log_z"][:] = -torch.inf
    data = data_of(page({0: [drawn]}, ABOUT, tokenizer, {}))["populations"][0]
    assert data["log_w"][-1] == [None] * 5 and data["log_z_hat"][-1] is None and data["distinct"][0][4] is None
    assert all(node[4] is None for node in data["nodes"][-1])


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
