"""Prefix parts: unbiased over all paths, one mutant a line; ready and wrong ones; commands."""

import itertools
import json
import math
from functools import partial

import pytest
import torch
import worlds
from worlds import ADAPTIVE, generator, mutant, table_world, tiny_conditional

import tsmc.runs
import tsmc.sampler
from eval.run.options import read_config
from eval.scorers.potentials import make_factors
from eval.viewer import __main__ as viewer
from tinystories.errors import InputError
from tsmc import Sigma, Target
from tsmc.runs import Phases
from twist import Factor, TextPotential, sample
from twist.potential import check_prefix, first_sentence, without

INF = math.inf
SCHEMES = ["multinomial", "systematic"]


def dead_world(vocab_size: int = 2, length: int = 3):
    """Model, twist, phi = 0 on all texts that begin with 0, 1, and a random f that is 0 there."""
    model, twist, potential = table_world(vocab_size, length, seed=2)
    ends = vocab_size ** (length - 2)
    potential.log_phi[ends : 2 * ends] = -INF
    source = generator(9)
    log_f = [2 * torch.randn(vocab_size**t, generator=source).double() for t in range(length + 1)]
    for t in range(2, length):
        ends = vocab_size ** (t - 2)
        log_f[t][ends : 2 * ends] = -INF

    def log_prefix(tokens):
        return log_f[tokens.shape[1]][worlds.sequence_numbers(tokens, vocab_size)]

    return (model, twist, potential), log_prefix


def error(scheme: str = "multinomial", ess_threshold: float = 1.0, *changes) -> float:
    """How far Z-hat and the samples are from unbiased, with the sampler changed or as it is."""
    world, log_prefix = dead_world()
    sampler = mutant(tsmc.sampler, *changes)
    sampler.tsmc = partial(sampler.tsmc, log_prefix=log_prefix)
    try:
        return worlds.bias(*world, 2, scheme, ess_threshold, module=sampler)
    except InputError:  # log Z-hat is NaN or infinite
        return INF


@pytest.mark.parametrize("ess_threshold", [1.0, ADAPTIVE, 0.0])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_z_hat_is_unbiased_with_dead_beginnings(scheme, ess_threshold):
    assert error(scheme, ess_threshold) < 1e-12


@pytest.mark.parametrize("ess_threshold", [1.0, ADAPTIVE, 0.0])
def test_conditional_runs_stay_exact(ess_threshold):
    model, twist, potential = table_world(2, 3, seed=2)
    sampler = mutant(tsmc.sampler)
    sampler.tsmc = partial(sampler.tsmc, log_prefix=lambda tokens: -2.0 * tokens.sum(-1).double())
    rule = ("multinomial", ess_threshold)
    inverse = worlds.mean_inverse(model, twist, potential, 2, *rule, module=sampler)
    assert inverse == pytest.approx(1, abs=1e-12)


MUTANTS = {
    "f leaves no trace in the weights": ("log_w = log_w + log_f", "pass"),
    "f is not divided out": (" - log_f  # [R, K]", "  # [R, K]"),
    "f = 0 is divided out": (".masked_fill(log_f == -torch.inf, 0.0)", ""),
    "f is not reordered": ("log_f = log_f[run, ancestors]", "pass"),
    "f counts at T too": ("log_prefix is not None and not is_last", "log_prefix is not None"),
    "f comes from the wrong place": ("log_w = log_w + log_f", "log_w = log_w + log_f.flip(1)"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_caught(name):
    assert max(error("multinomial", rule, MUTANTS[name]) for rule in (1.0, ADAPTIVE)) > 1e-3


def test_many_runs_use_the_prefix_part_of_sigma():
    (model, twist, potential), log_prefix = dead_world()
    given = (twist, 5, 20)
    found = {}
    for name, module in (("right", tsmc.runs), ("none", mutant(tsmc.runs, PASSED))):
        sigma = Sigma(model, potential, log_prefix)
        drawn = module.draw_population(Phases(), "x", None, sigma, *given, ess_threshold=0.5)
        found[name] = drawn.log_z
    plain = partial(tsmc.sampler.tsmc, model, twist, potential, 5, ess_threshold=0.5, runs=20)
    stream = Phases().stream("x", None, 0)
    assert torch.equal(found["right"], plain(generator=stream, log_prefix=log_prefix).log_z)
    assert not torch.equal(found["right"], found["none"])


PASSED = ("log_prefix=sigma.log_prefix, ", "")


@pytest.mark.parametrize("strength", [INF, 2.0])
@pytest.mark.parametrize("make", [without, first_sentence], ids=["without", "first-sentence"])
def test_what_is_dead_stays_dead_and_soon_dies(make, strength):
    """Over all continuations of four pieces; f is 0 only where phi of each continuation is."""
    pieces = [" dog", "gy", ".", '"', " a b"]
    factor = make({without: "dog", first_sentence: 2}[make], strength)
    phi = {}
    for text in map("".join, itertools.product(pieces, repeat=4)):
        phi[text] = torch.as_tensor(factor.log_phi([text])).item()
    caught = 0
    for t in (1, 2, 3):
        for begun in map("".join, itertools.product(pieces, repeat=t)):
            log_f = torch.as_tensor(factor.log_prefix([begun])).item()
            best = max(value for text, value in phi.items() if text.startswith(begun))
            assert log_f >= best, begun
            caught += log_f < 0
    assert caught > 10


@pytest.mark.parametrize(
    ("spec", "text", "log_f"),
    [
        ("without:dog", " a dog", 0.0),  # "dogs" is still possible
        ("without:dog", " a Dog.", -INF),
        ("without~3:dog", " a dog ran", -3.0),
        ("first-sentence:3", " a dog.", 0.0),  # a digit may follow
        ("first-sentence:3", " a dog. H", -INF),
        ("first-sentence~2:3", " a b c d e", -4.0),
    ],
)
def test_ready_prefix_parts(spec, text, log_f):
    (factor,) = make_factors([spec], 1.0, None)
    assert list(factor.log_prefix([text])) == [log_f]


def letters(rows):
    return ["".join("abcdefg"[token] for token in row) for row in rows]


def test_products_add_their_prefix_parts_and_an_unfinished_character_is_left_out():
    seen = []
    parts = [Factor(lambda texts: [0.0] * len(texts), "texts", log_prefix=lambda texts: [
        seen.append(text) or -float(len(text)) for text in texts]) for _ in range(2)]  # fmt: skip
    decode = lambda rows: [text + "\ufffd" for text in letters(rows)]  # noqa: E731
    potential = TextPotential([*parts, Factor(lambda texts: [0.0])], decode, torch.tensor([1]))
    assert potential.log_prefix(torch.tensor([[2, 3]])).tolist() == [-6.0]
    assert set(seen) == {"bcd"}
    assert TextPotential([Factor(len)], letters, torch.tensor([1])).log_prefix is None


WRONG = {
    "return [0.0 if len(t) > 3 else -math.inf for t in texts]": "is -inf for 'bc",
    "return [-float(len(texts))] * len(texts)": "another number alone than in a batch",
    "return [math.nan] * len(texts)": "log phi is nan for 'bc",
    "return [0.0]": "log phi has shape [1] for",
    "return [True] * len(texts)": "true or false",
    "return 1 / 0": "line 3: ZeroDivisionError",
}


@pytest.mark.parametrize("body", WRONG)
def test_a_wrong_prefix_part_is_one_line(tmp_path, body):
    path = tmp_path / "my.py"
    head = "import math\ndef f(texts): return [0.0] * len(texts)"
    path.write_text(f"import math\ndef g(texts):\n    {body}\n{head}\nf.prefix = g\n")
    factors = make_factors([f"{path}:f"], 1.0, None)
    potential = TextPotential(factors, letters, torch.tensor([1, 2]))
    with pytest.raises(InputError) as caught:
        check_prefix(tiny_conditional(1), potential, generator(0))
    assert f"--potential {path}:f" in str(caught.value) and WRONG[body] in str(caught.value)


def test_samples_and_probabilities_agree_with_enumeration():
    model = tiny_conditional(1)
    spell = Factor(lambda texts: [-float(text.count("c")) for text in texts])
    spell = Factor(spell.log_phi, "continuations", spell.log_phi)
    phi = TextPotential([spell, without("xyz")], letters, model.prompt)
    drawn = sample(model, phi, particles=20, runs=100, seed=3)
    target = Target(model, lambda tokens, log_p: phi(tokens))
    assert drawn.evidence().value == pytest.approx(target.log_z, abs=0.02)
    share = drawn.probability(lambda text: text.endswith("d"))
    exact = target.token_marginals()[-1, 3].exp().item()
    assert abs(share.value - exact) < 2 * share.half_width() < 0.2
    never = drawn.probability(lambda text: "z" in text)
    assert never.value == 0 and never.half_width() > 1 / drawn.ess
    for wrong in ({"runs": "8"}, {"particles": 0}, {"seed": 0.5}):
        with pytest.raises(InputError, match="give a whole number"):
            sample(model, phi, **wrong)


def test_the_threshold_follows_the_potential():
    for options, threshold in (("without:a", 0.5), ("keyword:a", 0.0), ("without:a x", 0.2)):
        spec, *explicit = options.split()
        rest = ["--ess-threshold", "0.2"] if explicit else []
        assert read_config(["--potential", spec, *rest], "")[0].ess_threshold == threshold


def test_sampling_without_training(capsys, tmp_path):
    sizes = ["--particles", "20", "--runs", "4", "--length", "8", "--samples", "3"]
    viewer.main(["--potential", "first-sentence:4", "One day, a", "--json", *sizes])
    record = json.loads(capsys.readouterr().out)
    assert (record["prompt"], record["run"], record["ess_threshold"]) == ("One day, a", None, 0.5)
    assert len(record["samples"]) == 3 and all(row["log_phi"] == 0 for row in record["samples"])
    assert "About 1 in" in record["remarks"][-1]
    page, picture = tmp_path / "page.html", tmp_path / "picture.png"
    viewer.main(
        ["--potential", "without:a", *sizes, "--html", str(page), "--picture", str(picture)]
    )
    text = capsys.readouterr().out
    assert "p proposes" in text and "1 / sum W^2" in text and "toxicity" not in text
    assert page.stat().st_size > 9000 and picture.stat().st_size > 9000
    for options in (["runs/none", "--potential", "without:a"], ["--potential", "luck"], []):
        with pytest.raises(SystemExit) as ended:
            viewer.main(options)
        assert ended.value.code == 2 and "error: " in capsys.readouterr().err.splitlines()[-1]
