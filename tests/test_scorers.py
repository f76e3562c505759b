"""The toxicity classifier and the sentence encoder against transformers, and what they refuse."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from networks import (
    AUTO,
    LIMIT,
    LOAD,
    PREFIX,
    SAVE,
    SCORER,
    TEXTS,
    VOCAB_SIZE,
    assert_close,
    edit,
    encoded,
    expected,
    write_checkpoint,
)
from safetensors.torch import load_file
from tokenizers import Tokenizer, processors

from eval.scorers import toxicity
from tinystories import products
from tinystories.checkpoint import write_json
from tinystories.errors import InputError
from tinystories.fast import pack

LONG = "the moon " * 200
LINEAR = "encoder.layer.1.attention.self.query.weight"


@pytest.fixture(scope="module", params=list(SCORER))
def role(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, role):
    """A directory written by transformers, the network in it, and the scores of TEXTS and LONG."""
    path = tmp_path_factory.mktemp(role)
    network = write_checkpoint(path, role)
    scores = expected(role, network, encoded(path, [*TEXTS, LONG]))
    return SimpleNamespace(path=path, network=network, scores=scores)


def raw_scores(role, path, texts):
    """Logits or vectors."""
    return SCORER[role](*LOAD[role](path)).run(texts)


@pytest.mark.parametrize("is_packed", [False, True])
def test_scores_are_those_of_transformers(role, checkpoint, monkeypatch, is_packed):
    monkeypatch.setattr(products, "SMALLEST", 1)  # all products are computed by oneDNN
    model, tokenizer = LOAD[role](checkpoint.path)
    scorer = SCORER[role](pack(model) if is_packed else model, tokenizer)
    assert_close(scorer.run([*TEXTS, LONG]), checkpoint.scores)
    inputs = encoded(checkpoint.path, TEXTS)
    assert inputs["attention_mask"].sum(1).unique().numel() > 3
    with torch.no_grad():
        assert_close(scorer.run.model(*inputs.values()), checkpoint.scores[:-1])
    ids = scorer.run.tokenizer.encode(LONG).ids
    assert len(ids) == LIMIT < len(tokenizer.encode(LONG).ids), "a copy is truncated"
    assert ids[-1] == tokenizer.encode("").ids[-1], "the last special token stays"


@pytest.mark.parametrize(
    ("role", "changes"),
    [
        ("toxicity", {"num_hidden_layers": 1, "num_attention_heads": 1}),
        ("toxicity", {"pad_token_id": 3}),
        ("similarity", {"layer_norm_eps": 0.5}),
        ("similarity", {"num_attention_heads": 24, "type_vocab_size": 1}),
    ],
    indirect=["role"],
)
def test_other_shapes(tmp_path, role, changes):
    network = write_checkpoint(tmp_path, role, **changes)
    pad = changes.get("pad_token_id", 1)
    ids = torch.tensor([[0, 9, 8, 2, pad, pad], [0, 7, 11, 12, 13, 2]])
    inputs = {"input_ids": ids, "attention_mask": (ids != pad).long()}
    model, _ = LOAD[role](tmp_path)
    with torch.no_grad():
        assert_close(model(*inputs.values()), expected(role, network, inputs))


def test_toxicity_is_a_log_probability_that_stays_finite(tmp_path):
    network = write_checkpoint(tmp_path, "toxicity")
    logits = expected("toxicity", network, encoded(tmp_path, TEXTS))
    model, tokenizer = toxicity.load(tmp_path)
    scorer = toxicity.ToxicityScorer(model, tokenizer)
    assert_close(scorer(TEXTS), torch.log(1 - torch.sigmoid(logits.double())).float())
    torch.testing.assert_close(
        scorer(TEXTS).exp() + scorer.log_nontoxic(TEXTS).exp(), torch.ones(6)
    )
    model.classifier.out_proj.bias.data += 100
    assert (scorer(TEXTS) < -50).all() and torch.isfinite(scorer(TEXTS)).all()


@pytest.mark.parametrize("has_prefix", [True, False])
def test_pooler_and_buffers_are_ignored_and_nothing_else(role, checkpoint, tmp_path, has_prefix):
    prefix = PREFIX[role] if has_prefix else ""
    extra = {"pooler.dense.weight": torch.ones(24, 24), "pooler.dense.bias": torch.ones(24)}
    for name in ("position_ids", "token_type_ids"):
        extra[f"embeddings.{name}"] = torch.zeros(1, LIMIT + 2, dtype=torch.long)

    def rename(tensors):
        inner = {name.removeprefix(PREFIX[role]): tensor for name, tensor in tensors.items()}
        renamed = {n if "classifier" in n else prefix + n: t for n, t in (inner | extra).items()}
        return renamed

    edit(checkpoint.path, tmp_path, rename)
    assert_close(raw_scores(role, tmp_path, TEXTS), checkpoint.scores[:-1])
    extra["pooler.extra"] = torch.ones(1)
    edit(checkpoint.path, tmp_path, rename)
    with pytest.raises(InputError, match=r"left over: pooler\.extra"):
        LOAD[role](tmp_path)


def test_a_score_depends_neither_on_the_batch_nor_on_the_order(role, checkpoint):
    model, tokenizer = LOAD[role](checkpoint.path)
    alone = torch.cat([SCORER[role](model, tokenizer).run([text]) for text in TEXTS])
    assert alone.std(0).max() > 0.04
    for batch_size in (1, 2, 4, 100):
        run = SCORER[role](model, tokenizer, batch_size).run
        torch.testing.assert_close(run(TEXTS), alone, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(run(TEXTS[::-1]), alone.flip(0), rtol=2e-6, atol=2e-6)


@torch.no_grad()
def test_bfloat16_scores_are_near_and_not_rounded_at_the_end(role, checkpoint):
    model, tokenizer = LOAD[role](checkpoint.path)
    wanted = SCORER[role](model, tokenizer)(TEXTS)
    rounded = SCORER[role](model.to(torch.bfloat16), tokenizer)(TEXTS)
    assert rounded.dtype == torch.float32 and not torch.equal(rounded, rounded.bfloat16().float())
    assert (rounded - wanted).abs().mean() < 0.1


def test_no_texts_and_no_batch(role, checkpoint):
    model, tokenizer = LOAD[role](checkpoint.path)
    assert SCORER[role](model, tokenizer)([]).shape == (0, *checkpoint.scores.shape[1:])
    with pytest.raises(InputError, match="batch_size is 0"):
        SCORER[role](model, tokenizer, batch_size=0)


def test_tensors_that_do_not_fit_are_named(role, checkpoint, tmp_path):
    name = next(n for n in load_file(checkpoint.path / "model.safetensors") if n.endswith(LINEAR))
    faults = {
        rf"missing: \S*{LINEAR}; left over: lm_head\.bias": lambda ts: (
            {n: t for n, t in ts.items() if n != name} | {"lm_head.bias": torch.zeros(3)}
        ),
        rf"{LINEAR} has shape \[24, 23\], not \[24, 24\]": lambda ts: (
            ts | {name: ts[name][:, 1:].clone()}
        ),
        f"{LINEAR} holds NaN": lambda ts: ts | {name: ts[name] * float("nan")},
        f"{LINEAR} holds NaN, infinite values or no floats": lambda ts: ts | {name: ts[name].int()},
    }
    for words, change in faults.items():
        edit(checkpoint.path, tmp_path, change)
        with pytest.raises(InputError, match=words) as caught:
            LOAD[role](tmp_path)
        assert str(tmp_path / "model.safetensors") in str(caught.value)


def test_a_score_that_is_not_finite_is_refused(role, checkpoint):
    model, tokenizer = LOAD[role](checkpoint.path)
    table = next(t for n, t in model.named_parameters() if "word_embeddings" in n)
    table.data[tokenizer.encode("No.").ids[1]] = float("nan")
    with pytest.raises(InputError, match=r"the score of 'No\.' is NaN"):
        SCORER[role](model, tokenizer, batch_size=2)(["hi", "No.", "the moon"])


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model_type", "gpt2", "model_type is 'gpt2', not "),
        ("hidden_act", "relu", "hidden_act is 'relu', not gelu"),
        ("position_embedding_type", "relative_key", "'relative_key', not absolute"),
        ("num_attention_heads", 5, "a multiple of num_attention_heads"),
        ("hidden_size", None, "'hidden_size'"),
        ("pad_token_id", VOCAB_SIZE, "pad_token_id must be a token"),
        ("vocab_size", 300, r"word_embeddings\.weight has shape \[340, 24\], not \[300, 24\]"),
        ("intermediate_size", 2**62, "not an integer from 1 to 10000000"),
        ("num_hidden_layers", 10**6, "not an integer from 1 to 1000"),
        ("type_vocab_size", 1.0, r"type_vocab_size is 1\.0"),
        ("layer_norm_eps", -1, "layer_norm_eps must be between 0 and 1"),
    ],
)
def test_other_configurations_are_refused(role, checkpoint, tmp_path, field, value, words):
    edit(checkpoint.path, tmp_path, dict)
    config = json.loads((tmp_path / "config.json").read_text()) | {field: value}
    write_json(tmp_path / "config.json", config)
    with pytest.raises(InputError, match=words):
        LOAD[role](tmp_path)


def test_a_classifier_with_two_labels_is_refused(tmp_path):
    write_checkpoint(tmp_path, "toxicity", num_labels=2)
    with pytest.raises(InputError, match=r"classifier\.out_proj\.\w+ has shape \[2"):
        toxicity.load(tmp_path)


def test_tokenizers_that_do_not_fit(role, checkpoint, tmp_path):
    edit(checkpoint.path, tmp_path, dict)
    file = tmp_path / "tokenizer.json"
    bare = Tokenizer.from_file(str(file))
    bare.post_processor = processors.ByteLevel()
    bare.save(str(file))
    with pytest.raises(InputError, match=r"tokenizer\.json: must add special tokens"):
        LOAD[role](tmp_path)
    bare.add_tokens([f"word{number}" for number in range(VOCAB_SIZE)])
    bare.save(str(file))
    with pytest.raises(InputError, match=rf"where config\.json has vocab_size {VOCAB_SIZE}"):
        LOAD[role](tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_save_is_read_by_transformers_and_by_load(role, checkpoint, tmp_path, dtype):
    SAVE[role](tmp_path, *LOAD[role](checkpoint.path), dtype)
    stored = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    network = AUTO[role].from_pretrained(tmp_path, dtype=torch.float32).eval()
    wanted = expected(role, network, encoded(tmp_path, TEXTS))
    assert_close(raw_scores(role, tmp_path, TEXTS), wanted)
    if dtype == torch.float32:
        assert_close(wanted, checkpoint.scores[:-1])


def test_padding_shifts_no_position_and_is_not_attended_to(role, checkpoint):
    model, _ = LOAD[role](checkpoint.path)
    pad = model.config.pad_token_id
    ids = torch.tensor([[5, 20, 21, 22, 6]])
    with torch.no_grad():
        alone = model(ids, torch.ones_like(ids))
        padded = F.pad(ids, (0, 7), value=pad)
        torch.testing.assert_close(model(padded, (padded != pad).long()), alone)
