"""What `sample` returns: estimates against enumeration, intervals that cover, heavy weights."""

import math

import pytest
import torch
from worlds import generator, letters, table_world, tiny_conditional

from tsmc.estimate import pareto_k
from tsmc.exact import Target
from twist import Pair, TextPotential, sample
from twist.factors import regex


def spelled(texts):
    return [-float(text.count("c")) for text in texts]


spelled.reads, spelled.prefix = "continuations", spelled
MODEL = tiny_conditional(1)
PHI = TextPotential([spelled], letters, MODEL.prompt)


def test_samples_and_probabilities_agree_with_enumeration():
    count = {"count": lambda texts: [text.count("c") for text in texts]}
    drawn = sample(MODEL, PHI, particles=20, runs=100, seed=3, scores=count)
    target = Target(MODEL, lambda tokens, log_p: PHI(tokens))
    evidence = drawn.evidence()
    assert abs(evidence.value - target.log_z) < 5 * evidence.std_error < 0.1
    share = drawn.probability(lambda text: text.endswith("d"))
    exact = target.log_sigma[-1].view(-1, 7)[:, 3].exp().sum().item()
    assert abs(share.value - exact) < 2 * share.half_width() < 0.2
    expected = drawn.probability(lambda text: 0.3 * text.endswith("d"))
    assert expected.value == pytest.approx(0.3 * share.value)
    rows = drawn.samples(4000)
    assert abs(sum(row["text"].endswith("d") for row in rows) / 4000 - share.value) < 0.03
    assert all(row["count"] == row["text"].count("c") for row in rows)
    for wrong in (1.1, math.nan, "yes", None):
        with pytest.raises(ValueError, match="not true, false or a number from 0 to 1"):
            drawn.probability(lambda text, wrong=wrong: wrong)


@pytest.mark.parametrize(("particles", "runs"), [(20, 5), (3, 2), (9, 1)])
def test_a_probability_and_its_interval_are_between_0_and_1(particles, runs):
    """And it is never certain, also of what holds for texts without weight alone."""
    hard = TextPotential([regex("c")], letters, MODEL.prompt)
    drawn = sample(MODEL, hard, None, particles, runs)
    for value in (0, 1):
        share = drawn.probability(lambda text, value=value: ("c" in text) == value)
        assert share.value == pytest.approx(value) and 0 <= share.value <= 1
        low, high = share.quantile(0.025), share.quantile(0.975)
        assert 0 <= low <= share.value <= high <= 1 and high - low >= min(1, 1 / drawn.ess)


def test_what_cannot_be_drawn_is_one_line_and_equal_seeds_give_equal_texts():
    for wrong in ({"runs": 0}, {"particles": 0}):
        with pytest.raises(ValueError, match="cannot be drawn; give 1 or more"):
            sample(MODEL, PHI, **wrong)
    calls = []

    def drifting(texts):
        """Other numbers from the eleventh call on: that of the texts that have been drawn."""
        calls.append(texts)
        return [-2.0 * (len(calls) > 10)] * len(texts)

    for factor in (lambda texts: torch.zeros(len(texts)).log_softmax(0), drifting):
        with pytest.raises(ValueError, match="it must depend on its text alone"):
            sample(MODEL, TextPotential([factor], letters, [1, 2]))
    assert len(calls) == 11
    with pytest.raises(ValueError, match="all 8 runs of 50 particles ended with weight zero"):
        sample(MODEL, TextPotential([regex("z")], letters, [1, 2]))
    drawn = [sample(MODEL, PHI, particles=3, runs=4, seed=seed) for seed in (5, 5, 6)]
    assert drawn[0].texts == drawn[1].texts != drawn[2].texts
    with pytest.raises(ValueError, match="0 samples cannot be drawn"):
        drawn[0].samples(0)


@pytest.mark.parametrize(("scale", "ess_threshold"), [(0.5, 1.0), (3.0, 0.0)])
def test_intervals_cover_where_weights_are_light_and_a_heavy_tail_is_told(scale, ess_threshold):
    """Nominal 95 % intervals of log Z and of a probability, in a world of 729 texts.

    Light runs resample at every step and share first tokens, which their ESS does not know.
    """
    model, twist, potential = table_world(3, 6, scale=scale)  # a twist that knows nothing
    target, pair, count = Target(model, potential), Pair(model, twist), 40
    places = target.tree.sequences().tolist()
    log_phi = dict(zip(letters(places), potential.log_phi.tolist(), strict=True))
    phi = TextPotential([lambda texts: [log_phi[one[1:]] for one in texts]], letters, model.prompt)
    options = {"particles": 20, "ess_threshold": ess_threshold}
    parts = [sample(model, phi, pair, seed=seed, **options) for seed in range(count)]
    evidence = [part.evidence() for part in parts]
    share = target.log_sigma[1][1].exp().item()
    found = [part.probability(lambda text: text[1] == "b") for part in parts]
    covered = sum(abs(x.value - target.log_z) < x.half_width() for x in evidence) / count
    covered_share = sum(abs(x.value - share) < x.half_width() for x in found) / count
    told = sum("Pareto k" in part.warning() for part in parts) / count
    if scale == 0.5:
        assert min(covered, covered_share) >= 0.85 and told < 0.1
    else:
        assert covered < 0.7 < told


def test_the_shape_of_a_pareto_distribution_is_found_where_there_is_one():
    """Also where each text has been drawn three times; not where most weights are equal or zero."""
    uniform = torch.rand(20, 4000, generator=generator(0), dtype=torch.float64)
    for k, copies in ((-0.5, 1), (0.3, 3), (0.7, 1), (1.5, 3)):
        log_weights = ((uniform**-k - 1) / k).log().repeat(1, copies)
        found = torch.tensor([pareto_k(row) for row in log_weights])
        assert found.mean().item() == pytest.approx(k, abs=0.15)
    none, few, equal = torch.full((3, 400), -math.inf)
    equal[:100], few[:4] = 0.0, 0.0
    repeated = torch.randn(9, generator=generator(0)).repeat(100)
    for log_weights in (equal, repeated, torch.zeros(400), torch.zeros(20)):
        assert math.isnan(pareto_k(log_weights))
    assert pareto_k(none) == pareto_k(few) == math.inf
    alike = TextPotential([lambda texts: [0.0] * len(texts)], letters, MODEL.prompt)
    drawn = sample(MODEL, alike)
    assert math.isnan(drawn.pareto_k) and drawn.warning() == ""
