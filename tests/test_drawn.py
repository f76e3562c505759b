"""What `sample` returns: estimates against enumeration, intervals that cover, heavy weights."""

import math

import pytest
import torch
from worlds import generator, letters, table_world, tiny_conditional

from tinystories.errors import InputError
from tsmc.estimate import pareto_k
from tsmc.exact import Target
from twist import Factor, Pair, TextPotential, sample
from twist.factors import regex


def spelled(texts):
    return [-float(text.count("c")) for text in texts]


def test_samples_and_probabilities_agree_with_enumeration():
    model = tiny_conditional(1)
    phi = TextPotential([Factor(spelled, "continuations", spelled)], letters, model.prompt)
    drawn = sample(model, phi, particles=20, runs=100, seed=3)
    target = Target(model, lambda tokens, log_p: phi(tokens))
    evidence = drawn.evidence()
    assert abs(evidence.value - target.log_z) < 5 * evidence.std_error < 0.1
    share = drawn.probability(lambda text: text.endswith("d"))
    exact = target.log_sigma[-1].view(-1, 7)[:, 3].exp().sum().item()
    assert abs(share.value - exact) < 2 * share.half_width() < 0.2
    expected = drawn.probability(lambda text: 0.3 * text.endswith("d"))
    assert expected.value == pytest.approx(0.3 * share.value)
    never = drawn.probability(lambda text: "z" in text)
    assert never.value == 0 and never.half_width() > 1 / drawn.ess
    for wrong in (1.1, math.nan):
        with pytest.raises(InputError, match="not true, false or a number from 0 to 1"):
            drawn.probability(lambda text, wrong=wrong: wrong)
    hard = TextPotential([regex("c")], letters, model.prompt)
    drawn = sample(model, hard, particles=20, runs=5)
    excluded = drawn.probability(lambda text: "c" not in text)  # holds for texts without weight
    assert excluded.value == 0 and excluded.half_width() > 1 / drawn.ess


def test_arguments_that_do_not_fit_are_one_line_and_equal_seeds_give_equal_texts():
    model = tiny_conditional(1)
    phi = TextPotential([spelled], letters, model.prompt)
    for wrong in ({"runs": 0}, {"particles": 0}):
        with pytest.raises(InputError, match="give a whole number"):
            sample(model, phi, **wrong)
    batch = TextPotential([lambda texts: torch.zeros(len(texts)).log_softmax(0)], letters, [1, 2])
    with pytest.raises(InputError, match="it must depend on its text alone"):
        sample(model, batch)
    drawn = [sample(model, phi, particles=3, runs=4, seed=seed) for seed in (5, 5, 6)]
    assert drawn[0].texts == drawn[1].texts != drawn[2].texts


def repeated(scale: float, count: int, ess_threshold: float):
    """`count` times what 8 runs give in a world of 729 texts, its log Z and P(first token is b).

    `scale` is that of the numbers of phi, and of a twist that knows nothing of it.
    """
    model, twist, potential = table_world(3, 6, scale=scale)

    def log_phi(texts):
        return potential(torch.tensor([["abc".index(letter) for letter in text] for text in texts]))

    phi = TextPotential([log_phi], letters, torch.tensor([]))
    given, pair = {"particles": 20, "ess_threshold": ess_threshold}, Pair(model, twist)
    parts = [sample(model, phi, pair, seed=seed, **given) for seed in range(count)]
    target = Target(model, potential)
    return parts, target.log_z, target.log_sigma[1][1].exp().item()


def test_intervals_cover_where_weights_are_light_and_a_heavy_tail_is_told():
    """Nominal 95 % intervals of log Z and of a probability, over 100 repetitions.

    Light runs resample at every step and share first tokens, which their ESS does not know.
    """
    parts, log_z, share = repeated(0.5, 100, 1.0)
    evidence = [part.evidence() for part in parts]
    assert sum(abs(x.value - log_z) < x.half_width() for x in evidence) >= 0.85 * 100
    chance = [part.probability(lambda text: text[0] == "b") for part in parts]
    assert sum(abs(x.value - share) < x.half_width() for x in chance) >= 0.85 * 100
    assert sum(part.warning() != "" for part in parts) < 0.1 * 100
    parts, log_z, _ = repeated(3.0, 40, 0.0)
    evidence = [part.evidence() for part in parts]
    assert sum(abs(x.value - log_z) < x.half_width() for x in evidence) < 0.7 * 40
    assert sum("Pareto k" in part.warning() for part in parts) > 0.7 * 40


@pytest.mark.parametrize("k", [-0.5, 0.3, 0.7, 1.5])
def test_the_shape_of_a_pareto_distribution_is_found(k):
    uniform = torch.rand(20, 4000, generator=generator(0), dtype=torch.float64)
    found = torch.tensor([pareto_k(row.log()) for row in (uniform**-k - 1) / k])
    assert found.mean().item() == pytest.approx(k, abs=0.12)


def test_weights_that_have_no_tail():
    zeros = torch.full((400,), -math.inf)
    equal, few = zeros.clone(), zeros.clone()
    equal[:100], few[:4] = 0.0, 0.0
    assert pareto_k(equal) < 0 and pareto_k(torch.zeros(400)) < 0
    assert pareto_k(few) == pareto_k(zeros) == math.inf
    assert math.isnan(pareto_k(torch.zeros(20)))
