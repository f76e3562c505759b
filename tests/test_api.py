"""What docs/api.md and docs/any_model.py say and do, with tiny networks of `transformers`."""

import re
from pathlib import Path

import pytest
import torch
import transformers
from networks import randomise
from worlds import generator

import docs.any_model
from distill import Phases, Pooled, PooledOptions, Published, PublishedOptions
from tinystories.any_model import AnyModel, TwistProcessor
from tinystories.errors import InputError
from tsmc.exact import Tree
from twist import Factor, TextPotential, TwistMLP, load_pair, sample
from twist import save_pair as save
from twist.adapter import Adapted

ROOT = Path(__file__).parents[1]
V, T, PROMPT = 3, 4, torch.tensor([1, 0, 2])
SIZES = {"vocab_size": V, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 16, "num_key_value_heads": 1, "max_position_embeddings": 16}
SIZES |= {"bos_token_id": 0, "eos_token_id": None}
PSI = randomise(TwistMLP(8, 6, V, generator(2)), 3).double()
each_kind = pytest.mark.parametrize("kind", ["gpt2", "llama"])


def any_model(kind: str, **changes) -> AnyModel:
    """A random network after a prompt, float64."""
    config = transformers.AutoConfig.for_model(kind, **SIZES, **changes)
    network = randomise(transformers.AutoModelForCausalLM.from_config(config), 1).double()
    network.get_output_embeddings().weight.data *= 0.4  # no token is very rare
    return AnyModel(network, PROMPT, T)


@each_kind
@torch.no_grad()
def test_every_step_is_that_of_the_network_however_the_rows_are_reordered(kind):
    model, source, rows = any_model(kind), generator(0), 6
    decoder, ids = model.decoder(rows), PROMPT.repeat(rows, 1)
    for _ in range(T):
        found = decoder.evaluate(model.head, slice(1, 5))
        torch.testing.assert_close(found, model.network(ids).logits[1:5, -1])
        tokens = torch.randint(V, (rows,), generator=source)
        ancestors = torch.randint(rows, (rows,), generator=source)
        ids = torch.cat([ids[ancestors], tokens[:, None]], 1)
        decoder.extend(tokens, ancestors)
    every = model.network(ids).logits[:, 2:-1].log_softmax(-1)  # [N, T, V]
    wanted = every.gather(-1, ids[:, 3:, None]).squeeze(-1)
    torch.testing.assert_close(model.log_probs(ids[:, 3:])[0], wanted)


@each_kind
def test_generate_draws_from_q(kind):
    model = any_model(kind)
    model.network.generation_config.update(temperature=0.7, top_p=0.8, repetition_penalty=1.5)
    options = {"do_sample": True, "max_new_tokens": T, "output_scores": True}
    options |= {"top_k": 0, "top_p": 1.0, "temperature": 1.0, "repetition_penalty": 1.0}
    options |= {"logits_processor": [TwistProcessor(model.network, PSI)]}
    made = model.network.generate(PROMPT.repeat(5, 1), return_dict_in_generate=True, **options)
    _, logits, hidden = model.log_probs(made.sequences[:, 3:])
    log_q = (logits + PSI(hidden)).log_softmax(-1)
    found = torch.stack(made.scores, 1).log_softmax(-1)  # float32 in `generate`
    torch.testing.assert_close(found.double(), log_q, rtol=0, atol=1e-5)
    assert (log_q - logits.log_softmax(-1)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("kind", "changes", "fault"),
    [("granite", {"logits_scaling": 2.0}, "write `head`"), ("openai-gpt", {}, "cache")],
)
def test_networks_whose_numbers_would_be_others_are_refused(kind, changes, fault):
    with pytest.raises(InputError, match=fault):
        any_model(kind, **changes)


def test_an_end_or_a_prompt_that_does_not_fit_is_refused():
    model = any_model("gpt2")
    for end in (None, V, -5, [2]):
        with pytest.raises(InputError, match="give one token"):
            AnyModel(model.network, PROMPT, T, end)
    for prompt, end in ((PROMPT[:2], -1), (PROMPT, 2)):
        phi = TextPotential([Factor(lambda texts: [0.0] * len(texts))], str_of, prompt, end)
        with pytest.raises(InputError, match="differ in prompt or end"):
            sample(model, phi)


@each_kind
@pytest.mark.parametrize("kind_of_learner", ["published", "pooled"])
def test_algorithm_1_runs_and_its_q_is_the_networks_own(tmp_path, kind, kind_of_learner):
    """log q of the pair that was saved, from the logits and states of a plain forward pass."""
    model = any_model(kind)
    factor = Factor(lambda texts: [-2.0 * text.count("0") for text in texts])
    phi = TextPotential([factor], str_of, PROMPT)
    if kind_of_learner == "published":
        sizes = {"ctl_updates": 3, "ctl_hidden_units": 6, "distill_runs": 3, "distill_updates": 2}
        learner = Published(model, phi, PublishedOptions(particles=4, **sizes), Phases(0))
    else:
        sizes = {"pool_first_draws": 40, "pool_first_rounds": 2, "pool_first_updates": 2}
        sizes |= {"pool_draws": 20, "pool_updates": 3, "pool_hidden_units": 6}
        learner = Pooled(model, phi, PooledOptions(**sizes), Phases(0))
    pair = learner.line_4(learner.line_3(learner.line_1(), 1), 1)
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
