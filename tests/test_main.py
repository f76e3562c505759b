"""The main job at a small scale: its rows, learners, options, samples; how commands end."""

import json
import math
import re
import shlex
import shutil
from types import SimpleNamespace

import pytest
import torch
from jobs import JOBS, refusal, run_main
from safetensors import safe_open
from safetensors.torch import load_file
from worlds import INF, letters, table_world

from distill.pair import Pair
from distill.paper import Paper
from eval.evaluate import DRAW, KL, log_importance, table
from eval.job import PAIR, Job, command
from eval.options import POCKET, Options, read_options
from eval.sample import TrainedJob, Weighted, report, sample
from eval.sample import main as sample_main
from eval.world import SAMPLES, World, load_sampling_world, load_world, sigma_of, try_texts
from main import LEARNERS
from tests.exact import Target
from tinystories.load import read_json, write_json
from tsmc.estimate import Estimate
from tsmc.proposal import proposal_log_probs
from tsmc.streams import Streams
from twist.potential import TextPotential

PROMPT = "Once upon a time, there was a"


def test_the_table_shows_toxicity_in_place_of_log_phi_also_where_all_texts_pass():
    for log_phi in (-1.0, 0.0):  # the latter with --beta 0
        row = {"toxicity": 0.25, "log_phi": log_phi}
        assert table({"base": row, "generations": []}).split() == ["toxicity", "Base", "0.250"]


def test_the_table_shows_ess_and_variety_where_no_exact_samples_give_kl():
    row = {"ess": 2.5, "similarity": 0.5, "distinct": 0.25}
    heading = table({"generations": [row]}).splitlines()[0]
    assert heading.split() == ["ESS", "similarity", "distinct"]
    assert table({"generations": [row | {KL: 3.0}]}).split() == ["KL", "Generation", "0", "3.00"]


def test_the_rows_of_a_job_hold_what_is_promised_and_the_table_shows_it(finished_job):
    """KL(sigma||p) = E_sigma[log phi] - log Z, with the errors of both."""
    job = finished_job("paper")
    results = read_json(job / "results.json")
    base, target, text = results["base"], results["target"], table(results)
    stored = load_file(job / "target" / SAMPLES)["log_phi"].double()
    assert base[KL] == pytest.approx((stored.mean() - target["log_z"]).item(), abs=1e-4)
    error = math.hypot(stored.std().item() / len(stored) ** 0.5, target["log_z_half_width"] / 1.96)
    wanted = Estimate(0.0, error, len(stored) - 1).half_width()
    assert base[f"{KL}_half_width"] == pytest.approx(wanted, rel=1e-4)
    for m, row in enumerate(results["generations"]):
        assert row["generation"] == m
        assert row["scores"] == 33 * (m + 1) + 78 * m and len(row["figures"]["twist_ess"]) == 3
        assert 1 <= row["ess"] <= 4 and 1 / 4 <= row["distinct"] <= 1 and row["dead_runs"] == 0
        assert len(row["examples"]) == 3 and row["examples"][0].startswith(PROMPT)
        assert f" {row[KL]:.2f} ± {row[f'{KL}_half_width']:.2f}  " in text
        below, above = row["log_z_half_width"], row.get("log_z_above")
        ends = f"[{row['log_z'] - below:.2f}, {row['log_z'] + (above or 0):.2f}]"
        interval = ends if above else f"± {below:.2f}"
        assert f" {row['log_z']:.2f} {interval}\n" in f"{text}\n"
        assert (
            row[DRAW] < row[KL] and f" {row[DRAW]:.2f} ± {row[f'{DRAW}_half_width']:.2f}  " in text
        )
        trained = TrainedJob(job, m, resampling="multinomial", ess_threshold=1.0)
        world, streams = trained.world, Streams(trained.options.seed)
        learner = Paper(world.base, world.potential, trained.options, streams)
        sizes = (trained.options.eval_particles, trained.options.eval_runs)
        every = learner.population(trained.pair, "every step", m, *sizes).samples.flatten(0, 1)
        toxicity = world.scores["toxicity"](world.potential.texts(every)).mean().item()
        assert row["every_step"] == pytest.approx(toxicity) and f"{toxicity:.3f}" in text
    policy = read_json(finished_job("dpo") / "results.json")["generations"][1]
    assert policy["scores"] == 32 and not {"ess", "every_step"} & policy.keys()


NARROW = ["--dtype", "bfloat16", "--eval-target-proposals", "0"]
VARIANTS = {
    "LoRA": [*JOBS["paper"], "--student", "lora", "--no-effective-potential"],
    "GRPO by LoRA": [*JOBS["grpo"], *NARROW, "--student", "lora"],
    "DPO, hard": [*JOBS["dpo"], "--potential", "keyword:named", "--generations", "0"],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_trains_what_it_should_and_is_kept_as_it_was(tmp_path, monkeypatch, name):
    path, options, keep, pairs = tmp_path / "job", VARIANTS[name], Job.keep, []
    note = lambda *arguments: pairs.append(arguments[3]) or keep(*arguments)  # noqa: E731
    monkeypatch.setattr(Job, "keep", note)
    run_main([*options, "--out", path])
    trained, results = TrainedJob(path), read_json(path / "results.json")
    tokens = torch.arange(40, 52).view(4, 3)
    both = [proposal_log_probs(one.model, one.twist, tokens) for one in (trained.pair, pairs[-1])]
    torch.testing.assert_close(*both, rtol=0, atol=0)
    models = (trained.world.base, trained.pair.model)
    before, after = (model.network.state_dict() for model in models)
    changed = {key for key in after if not torch.equal(after[key], before[key])}
    with safe_open(path / f"generation-{trained.generation}" / PAIR, "pt") as file:
        kept = {name.removeprefix("model.") for name in file.keys() if name.startswith("model.")}  # noqa: SIM118
    assert kept == changed  # nothing is written that p^(0) has
    wanted = "(q|v)_proj.weight" if "lora" in options else "wte|wpe|proj|fc|ln_"
    assert all(re.search(wanted, key) for key in changed)
    assert changed or name == "LoRA"  # there the runs held out may have chosen no update
    assert (trained.pair.twist is None) == ("--updates" in options)
    assert ("target" in results) == (name != "GRPO by LoRA") == (path / "target").exists()
    assert len(trained.sample(particles=8, runs=5).texts) == 40
    if name == "DPO, hard":  # texts of a policy with phi = 0 stay in its row
        (row,) = results["generations"]
        assert 0 < row["phi_positive"] < 1 and row["log_phi"] == -INF


@pytest.mark.learned
def test_potentials_are_multiplied_and_belong_to_the_job(tmp_path, capsys):
    """The classifier is not loaded where phi does not read it. A file that changes is refused."""
    job, own = tmp_path / "job", tmp_path / "own.py"
    own.write_text("def short(texts):\n    return [-len(text) / 50 for text in texts]\n")
    factors = ["regex: n", "keyword~3:named", f"{own}:short"]
    options = [word for factor in factors for word in ("--potential", factor)]
    options += ["--eval-particles", 20, "--generations", 0, "--toxicity-model", tmp_path / "none"]
    run_main([*JOBS["paper"], *options, "--out", job])
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
    # The job goes on in another place, whose files are named anew, if they are the same.
    lm = shutil.copytree(POCKET / "lm", tmp_path / "lm")
    moved = own.rename(lm / "own.py")
    sigma_of.cache_clear()
    assert "own.py" in refusal("--resume", job) and "own.py" in refusal(job, command=sample_main)
    options = [word.replace(str(own), str(moved)) for word in options[:6]] + ["--lm", str(lm)]
    run_main([*options, "--resume", job])
    sample_main([str(job), *options])
    assert TrainedJob(job, potential=tuple(options[1:6:2]), lm=str(lm)).world.base.length == 3
    moved.write_text(moved.read_text().replace("50", "40"))
    sigma_of.cache_clear()
    assert "potential have changed since it began" in refusal("--resume", job, *options)
    assert "changed since it began" in refusal(job, *options, command=sample_main)
    config = job / "config.json"
    config.write_text(config.read_text().replace('"files"', '"file"'))
    assert "is a job of an earlier version" in refusal(job, *options, command=sample_main)
    own.write_text("def short(texts):\n    return [0.5 for text in texts]\n")
    assert "as probabilities are; take logarithms" in refusal("--potential", f"{own}:short")


def test_tokens_without_text_and_unknown_ends_are_told(capsys):
    model, _, potential = table_world(3, 6)
    words = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1}, id_to_token="ab".__getitem__)
    try_texts(World(model, potential, {}, words), {"eos_token_id": [1]})
    ends, without_text = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"p ends \d+% of its texts, and goes on; give --end 'b'", ends)
    assert without_text == "p writes tokens that have no text in its tokenizer"


@pytest.mark.learned
@pytest.mark.parametrize("ess_threshold", [1.0, 0.0])
def test_evidence_probabilities_and_samples_agree_with_enumeration(ess_threshold):
    """Nominal 95 % intervals of log Z and of a probability, in a world of 729 texts, by particles
    that share first tokens, which their ESS does not know, and by independent ones."""
    model, twist, potential = table_world(3, 6, scale=0.5)  # a twist that knows nothing
    target = Target(model, potential)
    sequences = letters(target.tree.sequences.tolist())
    log_phi = dict(zip(sequences, potential.log_phi.tolist(), strict=True))
    phi = TextPotential([lambda texts: [log_phi[one[1:]] for one in texts]], letters, model.prompt)
    world, drawn, held = World(model, phi, {}, None), [], []
    exact = [target.log_z, target.log_sigma[1][1].exp().item()]
    for seed in range(40):
        options = Options(seed=seed, resampling="systematic", ess_threshold=ess_threshold)
        drawn.append(sample(world, Pair(model, twist), options, particles=20, runs=8))
        found = [drawn[-1].evidence(), drawn[-1].probability(lambda text: text[1] == "b")]
        errors = [y - x.value for x, y in zip(found, exact, strict=True)]
        held.append([-x.half_width() < y < x.above() for x, y in zip(found, errors, strict=True)])
    assert (torch.tensor(held).double().mean(0) >= 0.75).all()
    last = drawn[-1]
    assert last.is_independent == (ess_threshold == 0) and last.texts != drawn[0].texts
    rows = last.samples(4000)
    assert abs(sum(row["text"][1] == "b" for row in rows) / 4000 - found[1].value) < 0.04
    assert all(row["log_phi"] == pytest.approx(log_phi[row["text"][1:]]) for row in rows)
    log_p = dict(zip(sequences, target.log_p[-1].tolist(), strict=True))
    assert last.scores["log_p"].tolist() == pytest.approx([log_p[text[1:]] for text in last.texts])
    assert found[0].value == pytest.approx(last.log_z.exp().mean().log().item())
    # Texts of a run that are alike count as one, and independent texts are worth ESS at most.
    texts, equal = ["a"] * 10 + ["b"] * 10, torch.zeros(4, 5).double()
    alike = Weighted(texts, {}, equal, equal[:, 0], last.is_independent)
    error = (1 / 20 / 4 + 1 / 20**2) ** 0.5 if last.is_independent else (1 / 3 / 4) ** 0.5
    assert alike.probability(lambda text: text == "a").std_error == pytest.approx(error)


def test_a_text_that_neither_q_nor_phi_allows_has_no_weight():
    model, twist, _ = table_world(3, 3)
    with torch.no_grad():
        twist.log_psi[0] = -INF
    tokens = torch.tensor([[0, 1, 2], [0, 1, 2]])
    found = log_importance(Pair(model, twist), tokens, torch.tensor([-INF, 0.0]))
    assert found.tolist() == [-INF, INF]


def test_the_command_prints_what_programs_draw(finished_job, capsys):
    job, prompt = finished_job("paper"), "The ugly dog said"
    assert TrainedJob(job).generation == 1
    soft = TrainedJob(job, potential=("keyword~2:was",)).sample(6, 3)
    start = len(read_json(job / "config.json")["prompt"])
    had = [re.search(r"\bwas\b", text[start:]) for text in soft.texts]
    assert soft.scores["log_phi"].tolist() == [0.0 if has else -2.0 for has in had]
    changes = {"length": 4, "seed": 1, "dtype": "bfloat16", "ess_threshold": 1.0, "end": (".",)}
    other = TrainedJob(job, generation=0, prompt=prompt, **changes)
    assert {one.dtype for one in other.world.base.network.parameters()} == {torch.bfloat16}
    words = "--generation 0 --length 4 --seed 1 --dtype bfloat16 --ess-threshold 1 --end . --prompt"
    few = [str(job), "--particles", "6", "--runs", "3"]
    sample_main([*few, *words.split(), prompt])
    assert capsys.readouterr().out.endswith(f"{report(other.sample(6, 3), 10, 1)}\n")
    sample_main([*few, "--potential", "keyword~2:was"])
    assert capsys.readouterr().out.endswith(f"{report(soft, 10, 0)}\n")


def test_exact_samples_are_of_the_shipped_networks_and_of_no_other_sigma():
    world = load_world(Options(device="cpu"))
    tokens = world.exact.tokens
    assert world.score(tokens, world.potential.texts(tokens))["toxicity"].mean() > 0.5
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(world.potential(tokens), world.exact.log_phi.double(), **close)
    target = str(POCKET / "target")
    assert torch.equal(load_world(Options(device="cpu", target=target)).exact.tokens, tokens)
    assert load_world(Options(device="cpu", beta=9.0)).exact is None
    with pytest.raises(ValueError, match=r"--target .*target: holds exact samples of another"):
        load_world(Options(device="cpu", beta=9.0, target=target))


BAD = {  # options, and a pattern of the one line
    "--learner pool": "--learner.*invalid choice: 'pool'",
    "--learner dpo --pool-draws 3": "unrecognized arguments: --pool-draws 3; --help shows all",
    "--eval-particles 0": "--eval-particles is 0; give a number from 1",
    "--resampling best": "--resampling is 'best'; give one of multinomial, systematic",
    "--ess-threshold nan": "--ess-threshold is nan; give a number from 0 to 1$",
    "--ess-threshold 1.5": "--ess-threshold is 1.5; give a number from 0 to 1$",
    "--device gpu": "gpu",
    "--resume none": "none/config.json",
    "--target none": "none",
    "--end END": "--end END",
    "--potential toxcity": "--potential toxcity: is not understood",
    "--prompt 'a '": "the prompt ends in a space",
    "--potential regex:(": "unterminated subpattern",
    "--potential no.py:f": "no.py",
    "--out precious.txt": "--out precious.txt: exists already",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_options_are_refused_before_anything_is_written(tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "precious.txt").touch()
    said = refusal("--out", "job", *shlex.split(line))
    assert re.search(BAD[line], said), said
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


NO_SAMPLES = {"--generation 7": "generation-7", "--beta -1": "--beta is -1.0; give a number from 0"}
NO_SAMPLES |= {f"--{name} 0": f"--{name}" for name in ("particles", "runs", "samples")}


@pytest.mark.parametrize("line", NO_SAMPLES)
def test_bad_options_of_samples_are_refused(finished_job, line):
    assert NO_SAMPLES[line] in refusal(finished_job("paper"), *line.split(), command=sample_main)


def test_defaults_are_those_of_the_learner_and_the_preset_and_what_is_typed_comes_first(capsys):
    lines = ["--learner grpo", "--preset paper", "--preset paper --lm own --end . --end !"]
    grpo, genuine, typed = (read_options(line.split(), LEARNERS, "")[0] for line in lines)
    assert (grpo.learner, grpo.generations, grpo.strength, grpo.end) == ("grpo", 0, 0.64, ())
    assert genuine.lm.startswith("roneneldan/TinyStories-33M@")
    assert (typed.lm, typed.end) == ("own", (".", "!"))
    with pytest.raises(SystemExit, match="0"):
        run_main(["--help"])
    assert "[('toxicity',)]" in capsys.readouterr().out


def test_hints_of_a_target_that_nothing_reaches_and_of_an_end_that_nobody_names(tmp_path, capsys):
    line = refusal(*JOBS["paper"], "--potential", "regex:zyzzyva", "--out", tmp_path / "job")
    assert re.search("all 4 runs of 4 particles ended with weight zero.*soften.*keyword~8", line)
    lm = shutil.copytree(POCKET / "lm", tmp_path / "lm")
    write_json(
        lm / "config.json", json.loads((lm / "config.json").read_text()) | {"eos_token_id": 14}
    )
    for end, is_told in (((), True), ((".",), False)):
        load_sampling_world(Options(lm=str(lm), end=end, potential=("keyword:dog",)))
        said = capsys.readouterr().err
        assert bool(re.search(r"p ends \d+% of its texts, .* give --end '\.'", said)) == is_told


ENDS = [  # an error, the code that a command ends with, its line
    (ValueError("a\nb"), 2, "error: a b"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, "error: out of memory; lower"),
    (RuntimeError("Error(s) in loading state_dict"), 2, "error: .*loading state_dict"),
    (KeyboardInterrupt(), 130, "interrupted; continue with --resume runs/x$"),
]


def test_what_a_user_can_correct_is_one_line_and_a_mistake_of_ours_a_traceback(capsys):
    for error, code, line in ENDS:
        with pytest.raises(SystemExit) as ended, command("program") as remedies:
            remedies.append("continue with --resume runs/x")
            raise error
        (said,) = capsys.readouterr().err.splitlines()
        assert ended.value.code == code and re.match(f"program: {line}", said)
    for mistake in (RuntimeError("shapes"), TypeError(), KeyError(3)):
        with pytest.raises(type(mistake)), command("program"):
            raise mistake
