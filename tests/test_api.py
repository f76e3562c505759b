"""What docs/api.md, any_model.py and the tour say and do; tiny networks of `transformers`."""

import contextlib
import importlib
import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from networks import PROMPT, any_model
from worlds import ended_world, log_q, sequence_numbers

from distill import Paper, PaperOptions, Pooled, PooledOptions, Streams
from tsmc.exact import TableTwist, Target
from tsmc.sampler import Sigma
from twist import TextPotential, draw_batch, load_pair, sample, save_pair

ROOT = Path(__file__).parents[1]
TOUR = ROOT / "docs" / "tour.ipynb"
DECIMAL, PICTURE = re.compile(r"-?\d+\.\d+"), re.compile(r"\(([\w-]+\.png)\)")
SIZES = {"ctl_updates": 3, "distill_runs": 3, "distill_updates": 2, "particles": 4}
POOL = {"pool_first_draws": 40, "pool_first_rounds": 2, "pool_first_updates": 2}
POOL |= {"pool_draws": 20, "pool_updates": 3}


@pytest.mark.parametrize("kind", ["gpt2", "cohere"])
@pytest.mark.parametrize(
    ("make", "options"), [(Paper, PaperOptions(**SIZES)), (Pooled, PooledOptions(**POOL))]
)
def test_algorithm_1_of_a_network_of_transformers(tmp_path, kind, make, options):
    """Its pair lies in a file; the texts that it draws have weights p phi / q."""
    model = any_model(kind)
    spelled = lambda rows: ["".join(map(str, row)) for row in rows]  # noqa: E731
    phi = TextPotential([lambda texts: [-2.0 * text.count("0") for text in texts]], spelled, PROMPT)
    learner, path = make(model, phi, options, Streams(0)), tmp_path / "pair.safetensors"
    save_pair(path, learner.learn_twist(learner.distil(learner.first_twist(), 1), 1), model)
    pair = load_pair(path, any_model(kind))
    drawn = sample(model, phi, pair, particles=5, runs=3, seed=1)
    tokens = drawn.population.tokens.flatten(0, 1)  # [N, T]
    with torch.no_grad():
        ids = torch.cat([PROMPT.expand(len(tokens), -1), tokens], 1)
        logits = model.network(ids).logits[:, 2:-1]
        log_p = logits.log_softmax(-1).gather(-1, tokens[..., None]).sum((1, 2))
    log_w = log_p + phi(tokens) - log_q(pair)[sequence_numbers(tokens, 3)]
    torch.testing.assert_close(log_w, drawn.population.log_weights.flatten(), rtol=0, atol=1e-5)
    assert drawn.texts == ["102" + text for text in spelled(tokens.tolist())]


def test_the_examples_run_and_the_attributes_are_there(finished_job, tmp_path, monkeypatch, capsys):
    (tmp_path / "pocket").symlink_to(finished_job("paper"))
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    small = PooledOptions(pool_first_draws=60, pool_draws=30, pool_first_updates=2, pool_updates=2)
    example = importlib.import_module("docs.any_model")
    monkeypatch.setattr(example, "PooledOptions", lambda **options: small)
    example.main()
    printed = capsys.readouterr().out
    assert re.match(r"log Z-hat -\d.*\n(.*Once upon a time, there was a.*){3}", printed, re.DOTALL)
    page, names = (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), {}
    for code in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        exec(code.replace("runs/pocket", "pocket"), names)
    *lines, last = capsys.readouterr().out.splitlines()
    samples = [line for line in lines if re.match(r"-\d+\.\d+ -\d+\.\d+ Once", line)]
    log_z, exact = map(float, re.findall(r"-\d+\.\d+", last))
    assert len(samples) == 10 and log_z == pytest.approx(exact, abs=0.3)
    attributes = re.findall(r"`(drawn|population)\.(\w+)", page)
    assert len(attributes) > 10 and all(hasattr(names[name], part) for name, part in attributes)
    world, _, log_phi = ended_world(3, 3)  # the page's objective is zero at psi*
    psi = TableTwist(Target(world, log_phi).optimal_log_psi().detach())
    batch = draw_batch(Sigma(world, log_phi), psi, 50, torch.Generator().manual_seed(0))
    assert names["SoftValues"].twist_loss(None, psi, batch).item() < 1e-20


def test_every_cell_prints_what_stands_below_it(tmp_path, monkeypatch, request):
    """Numbers up to rounding; links, functions and pictures of the text are there.

    The notebook starts in its docs/, as Jupyter would, here in a copy of what it reads.
    """
    docs = tmp_path / "docs"
    docs.mkdir()
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    for name in ("tour.ipynb", "tiny.py"):
        (docs / name).symlink_to(TOUR.with_name(name))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(docs)
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    cells = json.loads(TOUR.read_text(encoding="utf-8"))["cells"]
    namespace = {"__name__": "notebook"}
    for cell in cells:
        if cell["cell_type"] == "code":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec("".join(cell["source"]), namespace)
            found = printed.getvalue()
            parts = [one.get("text") or one["data"]["text/plain"] for one in cell["outputs"]]
            expected = "\n".join("".join(part) for part in parts)
            assert DECIMAL.sub("#", found).split() == DECIMAL.sub("#", expected).split()
            for a, b in zip(DECIMAL.findall(found), DECIMAL.findall(expected), strict=True):
                unit = 10.0 ** -len(b.partition(".")[2])
                assert float(a) == pytest.approx(float(b), rel=0.02, abs=1.01 * unit), (a, b)
    text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert {picture.name for picture in docs.glob("*.png")} == set(PICTURE.findall(text))
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "https://" not in link]
    assert len(links) > 5 and all((TOUR.parent / link).exists() for link in links)
    for path, name in re.findall(r"`([\w/]+\.py)`:\s+`(\w+)`", text):
        code = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^(def|class) {name}\b", code, re.MULTILINE), (path, name)
