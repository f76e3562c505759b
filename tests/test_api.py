"""What docs/api.md and docs/any_model.py say and do, with tiny networks of `transformers`."""

import re
from pathlib import Path

import pytest
import torch
from networks import PROMPT, any_model

import docs.any_model
from distill import Paper, PaperOptions, Pooled, PooledOptions, Streams
from tinystories.errors import InputError
from tsmc.exact import Tree
from twist import Factor, TextPotential, load_pair, sample
from twist import save_pair as save
from twist.adapter import Adapted

ROOT = Path(__file__).parents[1]


def test_a_potential_of_another_prompt_or_end_is_refused():
    model = any_model("gpt2")
    for prompt, end in ((PROMPT[:2], -1), (PROMPT, 2)):
        phi = TextPotential([Factor(lambda texts: [0.0] * len(texts))], str_of, prompt, end)
        with pytest.raises(InputError, match="differ in prompt or end"):
            sample(model, phi)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("kind_of_learner", ["paper", "pooled"])
def test_algorithm_1_runs_and_its_q_is_the_networks_own(tmp_path, kind, kind_of_learner):
    """log q of the pair that was saved, from the logits and states of a plain forward pass."""
    model = any_model(kind)
    factor = Factor(lambda texts: [-2.0 * text.count("0") for text in texts])
    phi = TextPotential([factor], str_of, PROMPT)
    if kind_of_learner == "paper":
        sizes = {"ctl_updates": 3, "distill_runs": 3, "distill_updates": 2}
        learner = Paper(model, phi, PaperOptions(particles=4, **sizes), Streams(0))
    else:
        sizes = {"pool_first_draws": 40, "pool_first_rounds": 2, "pool_first_updates": 2}
        sizes |= {"pool_draws": 20, "pool_updates": 3}
        learner = Pooled(model, phi, PooledOptions(**sizes), Streams(0))
    pair = learner.learn_twist(learner.distil(learner.first_twist(), 1), 1)
    save(tmp_path, pair, model)
    pair = load_pair(tmp_path, any_model(kind))
    drawn = sample(model, phi, pair, particles=5, runs=3, seed=1)
    tokens = drawn.population.tokens.flatten(0, 1)  # [N, T]
    network = model.network if isinstance(pair.model, Adapted) else pair.model.network
    ids = torch.cat([PROMPT.expand(len(tokens), -1), tokens], 1)
    with torch.no_grad():
        found = network(ids, output_hidden_states=True)
        hidden = found.hidden_states[-1][:, 2:-1]  # [N, T, D]
        is_pooled = isinstance(pair.model, Adapted)
        log_psi = pair.model.adapter.tilt(hidden) if is_pooled else pair.twist(hidden)
        log_q = (found.logits[:, 2:-1] + log_psi).log_softmax(-1)
        log_q = log_q.gather(-1, tokens[..., None]).sum((1, 2))
        number = torch.tensor([int(text, 3) for text in str_of(tokens.tolist())])
        tree = Tree(pair.model).prefix_log_q(pair.twist)[-1]
    torch.testing.assert_close(tree[number], log_q, rtol=0, atol=1e-5)
    assert drawn.texts == ["102" + text for text in str_of(tokens.tolist())]


def str_of(rows: list[list[int]]) -> list[str]:
    return ["".join(map(str, row)) for row in rows]


def test_the_examples_run_and_the_attributes_are_there(finished_run, tmp_path, monkeypatch, capsys):
    for name, place in (("pocket", finished_run), ("checkpoints", ROOT / "checkpoints")):
        (tmp_path / name).symlink_to(place)
    monkeypatch.chdir(tmp_path)
    small = PooledOptions(pool_first_draws=60, pool_draws=30, pool_first_updates=2, pool_updates=2)
    monkeypatch.setattr(docs.any_model, "PooledOptions", lambda **options: small)
    docs.any_model.main()
    printed = capsys.readouterr().out
    assert re.match(r"log Z-hat -\d.*\n(.*Once upon a time, there was a.*){3}", printed, re.DOTALL)
    assert (tmp_path / "dog-pair" / "adapter.safetensors").exists()
    page, names = (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), {}
    for code in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        exec(code.replace("runs/pocket", "pocket"), names)
    *lines, last = capsys.readouterr().out.splitlines()
    samples = [line for line in lines if re.match(r"-\d+\.\d+ -\d+\.\d+ Once", line)]
    log_z, exact = map(float, re.findall(r"-\d+\.\d+", last))
    assert len(samples) == 10 and log_z == pytest.approx(exact, abs=0.3)
    attributes = re.findall(r"`(drawn|population)\.(\w+)", page)
    assert len(attributes) > 10 and all(hasattr(names[name], part) for name, part in attributes)
