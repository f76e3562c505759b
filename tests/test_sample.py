"""`python -m tsmc` and `load_run` give what was sampled; bad input is one line."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from worlds import generator

import tinystories
from eval import load_run
from eval.run.options import POCKET
from eval.run.setup import load_setup, toxicity
from eval.trained import load_generation
from eval.viewer import __main__ as viewer
from tinystories.checkpoint import read_json, read_metadata, write_json
from tinystories.errors import InputError
from tsmc import proposal_log_probs
from tsmc.proposal import sequence_log_probs
from tsmc.resampling import log_mean_exp, normalise
from twist.mlp import TwistMLP
from twist.saved import save_pair

PROMPT = "Once upon a time, there was a"
OTHER = "The ugly dog said"


@pytest.fixture(scope="module")
def run(finished_run, tmp_path_factory) -> Path:
    """A finished run with noise in all that was learned; generation 2: fine-tuned, and an MLP."""
    path = shutil.copytree(finished_run, tmp_path_factory.mktemp("runs") / "small")
    model, tokenizer = tinystories.load(POCKET / "lm")
    sizes, source = model.config, generator(0)
    model.wte.weight.data *= 0.9
    psi = TwistMLP(sizes.hidden_size, 16, sizes.vocab_size, source)
    save_pair(path / "generation-2", model, tokenizer, psi)
    for file in path.glob("generation-*/[at]*.safetensors"):
        tensors = load_file(file)
        for name in sorted(tensors.keys() - {"memory", "scores", "adapter.scores"}):
            tensors[name] += 0.02 * torch.randn(tensors[name].shape, generator=source)
        save_file(tensors, file, read_metadata(file))
    return path


@pytest.fixture
def printed(run, capsys):
    """What the program prints for this run, given arguments."""

    def call(*arguments: object) -> str:
        viewer.main([str(run), *map(str, arguments)])
        return capsys.readouterr().out

    return call


def test_json_and_table_account_for_every_particle(printed):
    options = ("--particles", 12, "--runs", 2, "--samples", 8, "--generation", 0)
    record = json.loads(printed("--json", *options))
    rows, samples = record["weighted"], record["samples"]
    assert sum(row["weight"] for row in rows) == pytest.approx(1)
    assert len(rows) == 24 and len(samples) == 8 and all(sample in rows for sample in samples)
    for row in rows:
        assert row["log_phi"] == pytest.approx(10 * math.log(row["toxicity"]), abs=1e-3)
    assert (record["generation"], record["length"], record["seed"]) == (0, 20, 0)
    for line, row in zip(printed(*options).strip().splitlines()[4:], samples, strict=True):
        *numbers, text = line.split(maxsplit=3)
        wanted = [row[name] for name in ("weight", "log_phi", "toxicity")]
        assert [float(number) for number in numbers] == pytest.approx(wanted, abs=5e-3)
        assert text == row["text"]


@pytest.mark.parametrize("m", [0, 1, 2])
@pytest.mark.parametrize("prompt", [PROMPT, OTHER])
def test_without_resampling_the_weights_are_those_of_the_target(run, m, prompt):
    trained = load_run(run, m)
    config = trained.options(prompt=prompt, particles=9, ess_threshold=0.0, rows=18, beta=0.3)
    setup = load_setup(config)
    sigma, twist = load_generation(setup, trained.path, m, torch.device("cpu"))
    drawn = trained.draw(config, setup, runs=4)  # two chunks of two runs
    tokens = drawn.population.tokens.flatten(0, 1)  # [R K, T]
    log_phi = config.beta * setup.log_toxicity(drawn.texts)
    log_q = proposal_log_probs(sigma.model, twist, tokens)[1]
    log_p = sequence_log_probs(setup.base, tokens)
    log_w = log_p + log_phi - log_q  # [R K]
    log_z = log_mean_exp(log_w.view(4, 9))
    torch.testing.assert_close(drawn.population.log_z, log_z, atol=1e-3, rtol=0)
    shares = normalise(log_w.double())
    torch.testing.assert_close(drawn.log_weights.exp(), shares, atol=1e-3, rtol=0)
    wanted = dict.fromkeys(drawn.texts, 0.0)
    for text, weight in zip(drawn.texts, shares.tolist(), strict=True):
        wanted[text] += weight
    samples = drawn.samples(4000, generator(0))
    texts = [sample["text"] for sample in samples]
    shares = {text: texts.count(text) / 4000 for text in wanted}
    assert shares == pytest.approx(wanted, abs=0.036)  # 4.5 standard errors
    log_p = dict(zip(drawn.texts, log_p.tolist(), strict=True))
    assert all(row["log_p"] == pytest.approx(log_p[row["text"]]) for row in samples)


def test_the_command_line_and_programs_draw_the_same(run, printed):
    own = printed("--json", "--runs", 3)
    assert own == printed("", "--json", "--runs", 3) == printed("--json", PROMPT, "--runs", 3)
    record = json.loads(own)
    for given in ({}, {"prompt": PROMPT}, {"prompt": "", "particles": 50, "seed": 0}):
        drawn = load_run(run).sample(runs=3, **given)
        assert drawn.samples(10) == record["samples"] and drawn.log_z_hat == record["log_z_hat"]
        assert [drawn.row(k) for k in range(150)] == record["weighted"]
    other = load_run(run, generation=0).sample(OTHER, particles=6, runs=3, length=3, seed=1)
    options = ("--json", "--particles", 6, "--runs", 3)
    changed = printed(OTHER, *options, "--length", 3, "--seed", 1, "--generation", 0)
    assert other.samples(10) == json.loads(changed)["samples"]
    assert load_run(run).sample(runs=3, seed=1).texts != drawn.texts
    record = json.loads(printed("--json", "--potential", "keyword~2:was"))
    had = [" was" in row["text"][len(PROMPT) :] for row in record["weighted"]]
    assert [row["log_phi"] for row in record["weighted"]] == [0.0 if has else -2.0 for has in had]


def test_several_generations_are_what_each_is_alone(printed, tmp_path):
    options = ("--json", "--particles", 6, "--generation")
    lines = printed(*options, 1, 0, 1, "--html", tmp_path / "page.html").splitlines()
    assert lines == [printed(*options, m).rstrip("\n") for m in (1, 0)]
    found = re.findall(r'"generation":(\d)', (tmp_path / "page.html").read_text(encoding="utf-8"))
    assert found == ["1", "0"]


def test_weights_of_zero_are_said_in_words(run, printed, monkeypatch):
    zero = lambda scorer, texts: torch.full((len(texts),), -torch.inf)  # noqa: E731
    monkeypatch.setattr(toxicity.ToxicityScorer, "__call__", zero)
    assert "All weights are zero" in printed("--particles", 4)
    record = json.loads(printed("--json", "--particles", 4), parse_constant=pytest.fail)
    assert record["log_z_hat"] is None and record["samples"] == [] and record["ess"] == 0
    with pytest.raises(InputError, match="weight zero"):
        load_run(run).sample(particles=4)


def test_bad_input_is_one_line(capsys, tmp_path, run):
    other = shutil.copytree(run, tmp_path / "other")
    config = read_json(other / "config.json")
    write_json(other / "config.json", config | {"networks": config["networks"] | {"lm": "0"}})
    for arguments, words in (
        ([], "no run is named: python -m tsmc RUN [PROMPT] [OPTIONS]; see python -m tsmc --help"),
        ([tmp_path / "none"], f"{tmp_path / 'none'}: no such directory"),
        ([tmp_path], f"{tmp_path}: holds no saved generation"),
        ([other], f"{other}: lm changed since the run was made; restore"),
        ([run, "--generation", 0, 7, 1], f"generation 7 is not in {run}; it holds 0, 1, 2"),
        ([run, "--runs", 0], "size 0 was asked for; ask for at least one"),
        ([run, "--particles", 0], "--particles is 0; give at least 1"),
        ([run, "word " * 200], "shorten"),
        ([run, "--potential", "luck"], "--potential luck"),
        ([run, "--html", "/dev/null/page.html"], "/dev/null/page.html: cannot be written"),
    ):
        with pytest.raises(SystemExit) as ended:
            viewer.main([str(argument) for argument in arguments])
        lines = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2 and words in lines[-1], lines
        assert all(line.startswith("loading the networks of ") for line in lines[:-1])
