"""The main job at a small scale: its rows, learners, options and hints; how commands end."""

import json
import math
import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from jobs import JOBS, refusal, run_main
from safetensors.torch import load_file
from worlds import INF

from eval.evaluate import KL, mean_pairwise_cosine, population_row, table
from eval.job import Job, command
from eval.options import POCKET, Options, read_options
from eval.sample import TrainedJob
from eval.sample import main as sample_main
from eval.world import SAMPLES, load_sampling_world, load_world, sigma_of
from main import LEARNERS
from tinystories.load import read_json
from tsmc.estimate import Estimate
from tsmc.proposal import proposal_log_probs
from tsmc.sampler import Population

PROMPT = "Once upon a time, there was a"


def test_the_rows_of_a_job_hold_what_is_promised_and_the_table_shows_it(finished_job):
    """KL(sigma||p) = E_sigma[log phi] - log Z, with the errors of both."""
    job = finished_job("paper")
    results = read_json(job / "results.json")
    base, target, rows = results["base"], results["target"], results["generations"]
    stored = load_file(job / "target" / SAMPLES)["log_phi"].double()
    assert base[KL] == pytest.approx((stored.mean() - target["log_z"]).item(), abs=1e-4)
    error = math.hypot(stored.std().item() / len(stored) ** 0.5, target["log_z_half_width"] / 1.96)
    wanted = Estimate(0.0, error, len(stored) - 1).half_width()
    assert base[f"{KL}_half_width"] == pytest.approx(wanted, rel=1e-4)
    for m, row in enumerate(rows):
        assert row["generation"] == m and row["populations"].keys() == {"4", "2"}
        assert row["scores"] == 44 * (m + 1) + 78 * m
        assert 1 <= row["ess"] <= 4 and 1 / 4 <= row["distinct"] <= 1 and row["dead_runs"] == 0
        assert len(row["examples"]) == 3 and row["examples"][0].startswith(PROMPT)
        assert len(row["figures"]["twist_ess"]) == 4
        assert f" {row[KL]:.2f} ± {row[f'{KL}_half_width']:.2f}  " in table(results)
        assert f" {row['log_z']:.2f} ± {row['log_z_half_width']:.2f}  " in table(results)
    assert "phi > 0" not in table(results) and "dead" not in table(results)
    policy = read_json(finished_job("dpo") / "results.json")["generations"][1]
    assert policy["scores"] == 32 and "ess" not in policy and "populations" not in policy


NARROW = ["--dtype", "bfloat16", "--eval-target-proposals", "0"]
VARIANTS = {
    "LoRA": [*JOBS["paper"], *NARROW[2:], "--student", "lora", "--no-effective-potential"],
    "GRPO by LoRA": [*JOBS["grpo"], *NARROW, "--student", "lora"],
    "DPO, hard": [*JOBS["dpo"], "--potential", "keyword:named", "--generations", "0"],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_trains_what_it_should_and_is_kept_as_it_was(tmp_path, monkeypatch, name):
    path, options, keep, pairs = tmp_path / "job", VARIANTS[name], Job.keep, []

    def keep_and_note(job, m, row, pair, learner):
        pairs.append(pair)
        return keep(job, m, row, pair, learner)

    monkeypatch.setattr(Job, "keep", keep_and_note)
    run_main([*options, "--out", path])
    trained = TrainedJob(path)
    base, pair = trained.world.base, trained.pair
    tokens = torch.arange(40, 60).view(4, 5)
    both = [proposal_log_probs(one.model, one.twist, tokens) for one in (pair, pairs[-1])]
    torch.testing.assert_close(*both, rtol=0, atol=0)
    before, after = base.network.state_dict(), pair.model.network.state_dict()
    changed = {key for key in after if not torch.equal(after[key], before[key])}
    wanted = "(q|v)_proj.weight" if "lora" in options else "wte|wpe|proj|fc|ln_"
    assert all(re.search(wanted, key) for key in changed)
    assert changed or name == "LoRA"  # there the runs held out may have chosen no update
    assert (pair.twist is None) == ("--updates" in options)
    results = read_json(path / "results.json")
    assert ("target" in results) == ("hard" in name) == (path / "target").exists()
    drawn = trained.sample(particles=8, runs=5)
    assert len(drawn.texts) == 40 and drawn.evidence().value < 0
    if name == "DPO, hard":  # texts of a policy with phi = 0 stay in its row
        row = results["generations"][0]
        assert 0 < row["phi_positive"] < 1 and row["log_phi"] == -INF


@pytest.mark.learned
def test_potentials_are_multiplied_and_the_classifier_is_not_loaded_where_phi_does_not_read_it(
    tmp_path, capsys
):
    job, own = tmp_path / "job", tmp_path / "own.py"
    own.write_text("def short(texts):\n    return [-len(text) / 50 for text in texts]\n")
    factors = ["regex: n", "keyword~3:named", f"{own}:short"]
    options = [word for factor in factors for word in ("--potential", factor)]
    options += ["--eval-particles", 20, "--generations", 0]
    run_main([*JOBS["paper"], *options, "--toxicity-model", tmp_path / "nowhere", "--out", job])
    printed = capsys.readouterr().out
    assert "log phi  phi > 0" in printed and "toxicity" not in printed
    results = read_json(job / "results.json")
    (row,) = results["generations"]
    assert results["base"]["phi_positive"] < 1 == results["target"]["phi_positive"]
    assert row["phi_positive"] == 1 and all(" n" in text for text in row["examples"])
    drawn = TrainedJob(job).sample(particles=9, runs=3)
    for text, log_phi in zip(drawn.texts, drawn.scores["log_phi"].tolist(), strict=True):
        found = -len(text) / 50 - 3 * (re.search(r"\bnamed\b", text) is None)
        assert log_phi == pytest.approx(found if " n" in text.removeprefix(PROMPT) else -INF)
    own.write_text(own.read_text().replace("50", "40"))
    sigma_of.cache_clear()
    for command_of in (run_main, sample_main):
        words = ["--resume", job] if command_of is run_main else [job]
        assert "potential have changed since it began" in refusal(*words, command=command_of)


def test_shipped_exact_samples_are_those_of_the_shipped_networks_and_of_no_other_sigma(tmp_path):
    world = load_world(Options(device="cpu"))
    assert world.exact is not None
    log_phi = world.potential(world.exact.tokens)
    torch.testing.assert_close(log_phi, world.exact.log_phi.double(), rtol=1e-4, atol=1e-4)
    assert (
        world.score(world.exact.tokens, world.potential.texts(world.exact.tokens))[
            "toxicity"
        ].mean()
        > 0.5
    )
    assert load_world(Options(device="cpu", beta=9.0)).exact is None
    with pytest.raises(
        ValueError, match=r"--target .*target: holds exact samples of another sigma"
    ):
        load_world(Options(device="cpu", beta=9.0, target=str(POCKET / "target")))


BAD = {  # options, and a pattern of the one line
    "--learner pool": "--learner.*invalid choice: 'pool'",
    "--learner dpo --pool-draws 3": "unrecognized arguments: --pool-draws 3; --help shows all",
    "--eval-particles 9 0": "--eval-particles is 0; give a number from 1",
    "--resampling best": "--resampling is 'best'; give one of multinomial, systematic",
    "--ess-threshold 1.5": "--ess-threshold is 1.5; give a number from 0 to 1$",
    "--beta nan": "--beta is nan; give a number from 0",
    "--particles many": "--particles: invalid int value: 'many'",
    "--device gpu": "gpu",
    "--generation 2": "unrecognized arguments: --generation 2",
    "runs/pocket": "unrecognized arguments: runs/pocket",
    "--resume nosuch": "nosuch/config.json",
    "--target nosuch": "nosuch",
    "--similarity-model no/such/place": "no/such/place",
    "--lm no/such/place": "no/such/place",
    "--lm .": "config.json",
    "--end END": "--end END",
    "--prompt a\u2420": "the prompt ends in a space",
    "--potential toxcity": "--potential toxcity: is not understood",
    "--potential regex:(": "regex:.*|unterminated subpattern",
    "--potential no.py:f": "no.py",
    "--out precious.txt": "--out precious.txt: exists already",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_options_are_refused_in_one_line_before_anything_is_written(
    tmp_path, monkeypatch, line
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "precious.txt").write_text("mine")
    said = refusal("--out", "job", *(word.replace("\u2420", " ") for word in line.split(" ")))
    assert re.search(BAD[line], said), said
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_defaults_are_those_of_the_learner_and_the_preset_and_what_is_typed_comes_first(capsys):
    lines = ["--learner grpo", "--preset paper", "--preset paper --lm own --end . --end !"]
    grpo, genuine, typed = (read_options(line.split(), LEARNERS, "")[0] for line in lines)
    assert (grpo.learner, grpo.generations, grpo.strength, grpo.end) == ("grpo", 0, 0.64, ())
    assert genuine.lm.startswith("roneneldan/TinyStories-33M@")
    assert (typed.lm, typed.end) == ("own", (".", "!"))
    with pytest.raises(SystemExit, match="0"):
        run_main(["--learner", "dpo", "--help"])
    assert "contrastive twist learning" in (said := capsys.readouterr().out) and "(50,)" in said


def test_a_target_that_nothing_reaches_says_what_to_change(tmp_path):
    line = refusal(*JOBS["paper"], "--potential", "regex:zyzzyva", "--out", tmp_path / "job")
    assert re.search("all 5 runs of 4 particles ended with weight zero.*soften.*keyword~8", line)


def test_an_end_that_nobody_names_is_told_where_p_writes_it(tmp_path, capsys):
    lm = shutil.copytree(POCKET / "lm", tmp_path / "lm")
    config = read_json(lm / "config.json")
    (lm / "config.json").write_text(json.dumps(config | {"eos_token_id": 14}))
    end = "."
    for ends, is_told in (((), True), ((end,), False)):
        load_sampling_world(Options(lm=str(lm), end=ends, potential=("keyword:dog",)))
        said = capsys.readouterr().err
        assert (
            bool(
                re.search(
                    rf"p ends \d+% of its texts, and goes on; give --end '{re.escape(end)}'", said
                )
            )
            == is_told
        )


def test_sigma_depends_on_files_options_and_on_nothing_else(tmp_path):
    """A user's file may be moved, but not be changed."""
    files = [tmp_path / "a" / "own.py", tmp_path / "b" / "own.py", tmp_path / "c" / "own.py"]
    for file, number in zip(files, (1, 1, 2), strict=True):
        file.parent.mkdir()
        file.write_text(f"def phi(texts):\n    return [-{number}.0] * len(texts)\n")
    first, moved, changed = (sigma_of(Options(potential=(f"{file}:phi",))) for file in files)
    assert first == moved != changed
    plain = sigma_of(Options())
    assert plain == sigma_of(Options(seed=3, particles=7, out="x", learner="dpo"))
    for other in ({"beta": 1.0}, {"length": 3}, {"prompt": "A"}, {"dtype": "bfloat16"}):
        assert sigma_of(Options(**other)) != plain
    hard = {"potential": ("keyword:a",)}
    assert sigma_of(Options(**hard, beta=1.0)) == sigma_of(Options(**hard))  # it reads no beta


def test_dead_runs_take_no_share_and_the_cosine_is_the_double_loop():
    """Three runs of two particles, the last one dead."""
    tokens = torch.tensor([[[0], [1]], [[2], [2]], [[4], [5]]])
    log_weights = torch.tensor([[0.25, 0.75], [0.0, 2.0], [0.0, 0.0]]).log()
    log_z = torch.tensor([3.0, 1.0, 0.0]).log()
    ess = torch.tensor([1.6, 1.0, 0.0])
    population = Population(tokens, log_weights, log_weights, tokens, log_z, ess)
    shares = torch.tensor([[0.1875, 0.5625], [0.0, 0.25], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(population.shares(), shares)
    row = population_row(population)
    assert row["log_z"] == pytest.approx(math.log(4 / 3))
    assert (row["dead_runs"], row["distinct"]) == (1, 0.75)
    assert row["log_z_hat_mean"] == pytest.approx(math.log(3) / 2)
    assert row["ess"] == pytest.approx(1.3)
    vectors = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    unit = F.normalize(vectors.double(), dim=-1)
    cosines = [unit[i] @ unit[j] for i in range(6) for j in range(6) if i != j]
    assert mean_pairwise_cosine(vectors) == pytest.approx(sum(cosines).item() / 30, abs=1e-12)


ENDS = [  # an error, the code that a command ends with, its line
    (ValueError("a\nb"), 2, "error: a b"),
    (FileNotFoundError(2, "No such file", "x.json"), 2, "error: .*x.json"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, "error: out of memory; lower"),
    (MemoryError(), 2, "error: out of memory; lower"),
    (RuntimeError("Error(s) in loading state_dict"), 2, "error: .*loading state_dict"),
    (KeyboardInterrupt(), 130, "interrupted; continue with --resume runs/x$"),
]


@pytest.mark.parametrize(("error", "code", "line"), ENDS)
def test_what_a_user_can_correct_is_one_line(capsys, error, code, line):
    with pytest.raises(SystemExit) as ended, command("program") as remedies:
        remedies.append("continue with --resume runs/x")
        raise error
    (said,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == code and re.match(f"program: {line}", said)


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes"), TypeError(), KeyError(3), AssertionError()]
)
def test_programmers_mistakes_have_a_traceback(error):
    with pytest.raises(type(error)), command("program"):
        raise error
