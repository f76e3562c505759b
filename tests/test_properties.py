"""Invariants over random worlds and options, drawn by hypothesis."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import bias, every_conditional_path, generator, sequence_numbers, table_world, traced

from tsmc.exact import Target
from tsmc.resampling import SCHEMES
from tsmc.sampler import tsmc
from tsmc.table import TableModel, TableTwist
from tsmc.trace import Trace
from twist.potential import effective_potential

sizes = st.integers(1, 4)
numbers = st.integers(0, 10**6)
worlds = st.builds(table_world, sizes, sizes, numbers, st.sampled_from([0.1, 1.0, 5.0]))
choices = {
    "particles": st.integers(1, 8),
    "runs": sizes,
    "resample": st.sampled_from(list(SCHEMES.values())),
    "ess_threshold": st.sampled_from([0.0, 0.3, 0.8, 1.0]),
}
options = st.fixed_dictionaries(choices)
quick = settings(max_examples=25, deadline=None)
slower = settings(max_examples=12, deadline=None)


@quick
@given(worlds, options, numbers)
def test_optimal_twist_is_exact_whatever_the_options(world, options, seed):
    model, _, potential = world
    target, trace = Target(model, potential), Trace()
    optimal = TableTwist(target.optimal_log_psi())
    options |= {"generator": generator(seed), "observer": trace}
    population = tsmc(model, optimal, potential, **options)
    wanted = torch.zeros_like(trace.log_w)
    wanted[0] = target.log_z  # the evidence is known at the first step
    torch.testing.assert_close(trace.log_w, wanted, rtol=0, atol=1e-10)
    torch.testing.assert_close(population.log_z, wanted[0, :, 0], rtol=0, atol=1e-10)
    everyone = torch.full_like(population.ess, options["particles"])
    torch.testing.assert_close(population.ess, everyone)


@quick
@given(worlds, options, numbers)
def test_genealogy_weights_and_evidence_fit_together(world, options, seed):
    model, twist, potential = world
    trace = Trace()
    population = tsmc(model, twist, potential, generator=generator(seed), observer=trace, **options)
    assert torch.equal(traced(trace), population.samples)
    assert (population.tokens >= 0).all() and (population.tokens < model.vocab_size).all()
    particles = options["particles"]
    assert (trace.ess >= 1 - 1e-9).all() and (trace.ess <= particles + 1e-9).all()
    if options["ess_threshold"] == 1:
        by_hand = (trace.log_w.logsumexp(-1) - math.log(particles)).sum(0)
    elif options["ess_threshold"] == 0:
        by_hand = trace.log_w.sum(0).logsumexp(-1) - math.log(particles)
    else:
        return
    torch.testing.assert_close(population.log_z, by_hand, rtol=0, atol=1e-9)


@quick
@given(worlds, options, numbers, st.lists(st.floats(-50, 50), min_size=4, max_size=4))
def test_a_constant_added_to_each_step_of_the_twist_changes_nothing(
    world, options, seed, constants
):
    model, twist, potential = world
    widths = torch.tensor([model.vocab_size**t for t in range(model.length)])
    shift = torch.tensor(constants[: model.length]).double().repeat_interleave(widths)
    shifted = TableTwist(twist.log_psi.detach() + shift[:, None])
    plain, moved = (
        tsmc(model, psi, potential, generator=generator(seed), **options)
        for psi in (twist, shifted)
    )
    torch.testing.assert_close(moved.log_z, plain.log_z, rtol=0, atol=1e-9)
    assert torch.equal(moved.samples, plain.samples)


@slower
@given(numbers, st.sampled_from(sorted(SCHEMES)), st.sampled_from([0.0, 0.8, 0.95, 1.0]))
def test_evidence_and_samples_are_unbiased_in_any_world(seed, scheme, ess_threshold):
    model, twist, potential = table_world(2, 3, seed)
    target = Target(model, potential)
    assert bias(model, twist, potential, target, 2, scheme, ess_threshold) < 1e-12


@slower
@given(numbers, st.sampled_from([0.0, 0.8, 1.0]))
def test_conditional_runs_are_unbiased_for_the_inverse_in_any_world(seed, ess_threshold):
    model, twist, potential = table_world(2, 3, seed)
    target = Target(model, potential)
    world = (model, twist, potential, target)
    chances, population = every_conditional_path(*world, 2, ess_threshold)
    inverse = (chances * (-population.log_z).exp()).sum().log().item()
    assert inverse == pytest.approx(-target.log_z, abs=1e-12)


@quick
@given(worlds, numbers, st.sampled_from([1.0, 4.0]))
def test_every_generation_has_the_same_sigma_and_evidence(world, seed, scale):
    base, _, potential = world
    student = TableModel.random(base.vocab_size, base.length, generator(seed), scale)
    first, later = Target(base, potential), Target(student, effective_potential(potential, base))
    assert later.log_z == pytest.approx(first.log_z, abs=1e-10)
    torch.testing.assert_close(later.log_sigma[-1], first.log_sigma[-1], rtol=0, atol=1e-10)


@quick
@given(worlds)
def test_levels_of_the_tree_agree(world):
    model, twist, potential = world
    target = Target(model, potential)
    log_q = [level.detach() for level in target.tree.prefix_log_q(twist)]
    for levels in (target.log_p, target.log_sigma, log_q):
        for shorter, longer in itertools.pairwise(levels):
            summed = longer.view(len(shorter), -1).logsumexp(-1)
            torch.testing.assert_close(summed, shorter, rtol=0, atol=1e-10)
    sequences = target.tree.sequences()
    places = sequence_numbers(sequences, model.vocab_size)
    assert torch.equal(places, torch.arange(len(sequences)))
