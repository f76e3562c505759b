"""The toxicity classifier and the sentence encoder against transformers, and what they refuse."""

import json
from types import SimpleNamespace

import pytest
import torch
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
    encoded,
    expected,
    oracle,
    write,
)
from safetensors.torch import load_file, save_file
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
    """A directory written by transformers, its tensors, and the network's scores of TEXTS."""
    path, network = tmp_path_factory.mktemp(role), oracle(role)
    write(path, role, network)
    scores = expected(role, network, encoded(path, TEXTS))
    long_score = expected(role, network, encoded(path, [LONG]))
    tensors = load_file(path / "model.safetensors")
    return SimpleNamespace(path=path, tensors=tensors, scores=scores, long_score=long_score)


@pytest.fixture
def edited(checkpoint, tmp_path):
    """edited(tensors, **fields): a copy of the checkpoint with these tensors and fields."""

    def edit(tensors=None, **fields):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_bytes((checkpoint.path / name).read_bytes())
        config = json.loads((checkpoint.path / "config.json").read_text())
        write_json(tmp_path / "config.json", config | fields)
        save_file(tensors or checkpoint.tensors, tmp_path / "model.safetensors")
        return tmp_path

    return edit


def run(role, path, texts=TEXTS):
    """The raw scores of the texts: logits or vectors."""
    return SCORER[role](*LOAD[role](path)).run(texts)


@pytest.mark.parametrize("is_packed", [False, True])
def test_scores_are_those_of_transformers(role, checkpoint, monkeypatch, is_packed):
    monkeypatch.setattr(products, "SMALLEST", 1)  # all products are computed by oneDNN
    model, tokenizer = LOAD[role](checkpoint.path)
    scorer = SCORER[role](pack(model) if is_packed else model, tokenizer)
    assert_close(scorer.run([*TEXTS, LONG]), torch.cat([checkpoint.scores, checkpoint.long_score]))
    inputs = encoded(checkpoint.path, TEXTS)
    assert inputs["attention_mask"].sum(1).unique().numel() > 3
    with torch.no_grad():
        assert_close(scorer.run.model(*inputs.values()), checkpoint.scores)
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
    network, pad = oracle(role, **changes), changes.get("pad_token_id", 1)
    write(tmp_path, role, network)
    ids = torch.tensor([[0, 9, 8, 2, pad, pad], [0, 7, 11, 12, 13, 2]])
    inputs = {"input_ids": ids, "attention_mask": (ids != pad).long()}
    with torch.no_grad():
        model, _ = LOAD[role](tmp_path)
        assert_close(model(*inputs.values()), expected(role, network, inputs))


@pytest.mark.parametrize("role", ["toxicity"], indirect=True)
def test_toxicity_is_a_log_probability_that_stays_finite(checkpoint):
    model, tokenizer = toxicity.load(checkpoint.path)
    scorer = toxicity.ToxicityScorer(model, tokenizer)
    toxic = torch.log(1 - torch.sigmoid(checkpoint.scores.double()))
    assert_close(scorer(TEXTS), toxic.float())
    total = scorer(TEXTS).exp() + scorer.log_nontoxic(TEXTS).exp()
    torch.testing.assert_close(total, torch.ones(len(TEXTS)))
    model.classifier.out_proj.bias.data += 100
    assert (scorer(TEXTS) < -50).all() and torch.isfinite(scorer(TEXTS)).all()


@pytest.mark.parametrize("has_prefix", [True, False])
def test_pooler_and_buffers_are_ignored_and_nothing_else(role, checkpoint, edited, has_prefix):
    bare = {name.removeprefix(PREFIX[role]): t for name, t in checkpoint.tensors.items()}
    bare |= {"pooler.dense.weight": torch.ones(24, 24), "pooler.dense.bias": torch.ones(24)}
    bare |= {
        f"embeddings.{n}": torch.zeros(1, 9).long() for n in ("position_ids", "token_type_ids")
    }
    prefix = PREFIX[role] if has_prefix else ""
    tensors = {n if "classifier" in n else prefix + n: tensor for n, tensor in bare.items()}
    assert_close(run(role, edited(tensors)), checkpoint.scores)
    with pytest.raises(InputError, match=r"left over: pooler\.extra"):
        LOAD[role](edited(tensors | {f"{prefix}pooler.extra": torch.ones(1)}))


def test_a_score_depends_neither_on_the_batch_nor_on_the_order(role, checkpoint):
    alone = torch.cat([run(role, checkpoint.path, [text]) for text in TEXTS])
    assert alone.std(0).max() > 0.04
    for batch_size in (1, 2, 4, 100):
        score = SCORER[role](*LOAD[role](checkpoint.path), batch_size).run
        torch.testing.assert_close(score(TEXTS), alone, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(score(TEXTS[::-1]), alone.flip(0), rtol=2e-6, atol=2e-6)


@torch.no_grad()
def test_bfloat16_scores_are_near_and_not_rounded_at_the_end(role, checkpoint):
    model, tokenizer = LOAD[role](checkpoint.path)
    wanted = SCORER[role](model, tokenizer)(TEXTS)
    rounded = SCORER[role](model.to(torch.bfloat16), tokenizer)(TEXTS)
    assert rounded.dtype == torch.float32 and not torch.equal(rounded, rounded.bfloat16().float())
    assert (rounded - wanted).abs().mean() < 0.1


def test_no_texts_and_no_batch(role, checkpoint):
    assert run(role, checkpoint.path, []).shape == (0, *checkpoint.scores.shape[1:])
    with pytest.raises(InputError, match="batch_size is 0"):
        SCORER[role](*LOAD[role](checkpoint.path), batch_size=0)


def test_tensors_that_do_not_fit_are_named(role, checkpoint, edited):
    tensors = checkpoint.tensors
    prefix, name = PREFIX[role], next(name for name in tensors if name.endswith(LINEAR))
    renamed = {"other" if n == name else n: tensor for n, tensor in tensors.items()}
    faults = {
        rf"missing: \S*{LINEAR}; left over: other": renamed,
        rf"{LINEAR} has shape \[24\], not \[24, 24\]": tensors | {name: torch.ones(24)},
        f"{LINEAR} is there with and without {prefix}": tensors
        | {prefix + LINEAR: torch.ones(1), LINEAR: torch.ones(1)},
        f"{LINEAR} holds NaN": tensors | {name: torch.full((24, 24), torch.nan)},
        f"{LINEAR} holds .* no floats": tensors | {name: torch.ones(24, 24).int()},
    }
    for words, changed in faults.items():
        with pytest.raises(InputError, match=rf"model\.safetensors: .*{words}"):
            LOAD[role](edited(changed))


def test_a_score_that_is_not_finite_is_refused(role, checkpoint):
    model, tokenizer = LOAD[role](checkpoint.path)
    table = next(t for n, t in model.named_parameters() if "word_embeddings" in n)
    table.data[tokenizer.encode("No.").ids[1]] = torch.nan
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
def test_other_configurations_are_refused(role, edited, field, value, words):
    with pytest.raises(InputError, match=words):
        LOAD[role](edited(**{field: value}))


def test_a_classifier_with_two_labels_is_refused(tmp_path):
    write(tmp_path, "toxicity", oracle("toxicity", num_labels=2))
    with pytest.raises(InputError, match=r"classifier\.out_proj\.\w+ has shape \[2"):
        toxicity.load(tmp_path)


def test_tokenizers_that_do_not_fit(role, edited):
    path = edited()
    bare = Tokenizer.from_file(str(path / "tokenizer.json"))
    bare.post_processor = processors.ByteLevel()
    bare.save(str(path / "tokenizer.json"))
    with pytest.raises(InputError, match=r"tokenizer\.json: must add special tokens"):
        LOAD[role](path)
    bare.add_tokens([f"word{number}" for number in range(VOCAB_SIZE)])
    bare.save(str(path / "tokenizer.json"))
    with pytest.raises(InputError, match=rf"where config\.json has vocab_size {VOCAB_SIZE}"):
        LOAD[role](path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_save_is_read_by_transformers_and_by_load(role, checkpoint, tmp_path, dtype):
    SAVE[role](tmp_path, *LOAD[role](checkpoint.path), dtype)
    stored = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    network = AUTO[role].from_pretrained(tmp_path, dtype=torch.float32).eval()
    wanted = expected(role, network, encoded(tmp_path, TEXTS))
    assert_close(run(role, tmp_path), wanted)
    if dtype == torch.float32:
        assert_close(wanted, checkpoint.scores)
