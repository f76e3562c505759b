"""Invariants over random toy worlds, drawn by hypothesis."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import every_conditional_path, every_path, generator, sequence_numbers, table_world, traced

from tsmc.exact import Target
from tsmc.resampling import SCHEMES
from tsmc.sampler import tsmc
from tsmc.table import TableModel, TableTwist
from tsmc.trace import Trace
from twist.potential import effective_potential

worlds = st.builds(
    table_world, st.integers(1, 4), st.integers(1, 4), st.integers(0, 10**6), st.sampled_from([0.1, 1.0, 5.0])
)
options = st.fixed_dictionaries(
    {
        "particles": st.integers(1, 8),
        "runs": st.integers(1, 4),
        "resample": st.sampled_from(list(SCHEMES.values())),
        "ess_threshold": st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    }
)
seeds = st.integers(0, 2**31).map(generator)
quick = settings(max_examples=25, deadline=None)


@quick
@given(worlds, options, seeds)
def test_optimal_twist_is_exact_whatever_the_options(world, options, source):
    model, _, potential = world
    target, trace = Target(model, potential), Trace()
    population = tsmc(
        model, TableTwist(target.optimal_log_psi()), potential, generator=source, observer=trace, **options
    )
    torch.testing.assert_close(population.log_z, torch.full_like(population.log_z, target.log_z), rtol=0, atol=1e-10)
    torch.testing.assert_close(trace.log_w[1:], torch.zeros_like(trace.log_w[1:]), rtol=0, atol=1e-10)
    torch.testing.assert_close(population.ess, torch.full_like(population.ess, options["particles"]))


@quick
@given(worlds, options, seeds)
def test_genealogy_weights_and_evidence_fit_together(world, options, source):
    model, twist, potential = world
    trace = Trace()
    population = tsmc(model, twist, potential, generator=source, observer=trace, **options)
    assert torch.equal(traced(trace), population.samples)
    assert (population.tokens >= 0).all() and (population.tokens < model.table.shape[1]).all()
    assert (trace.ess >= 1 - 1e-9).all() and (trace.ess <= options["particles"] + 1e-9).all()
    if options["ess_threshold"] == 1:
        by_hand = (trace.log_w.logsumexp(-1) - math.log(options["particles"])).sum(0)
    elif options["ess_threshold"] == 0:
        by_hand = trace.log_w.sum(0).logsumexp(-1) - math.log(options["particles"])
    else:
        return
    torch.testing.assert_close(population.log_z, by_hand, rtol=0, atol=1e-9)


@quick
@given(worlds, options, st.integers(0, 2**31), st.lists(st.floats(-50, 50), min_size=4, max_size=4))
def test_gauge(world, options, seed, constants):
    model, twist, potential = world
    vocab_size = model.table.shape[1]
    steps = torch.tensor([vocab_size**t for t in range(model.length)])
    shift = torch.tensor(constants[: model.length]).double().repeat_interleave(steps)[:, None]
    plain = tsmc(model, twist, potential, generator=generator(seed), **options)
    shifted = TableTwist(twist.log_psi.detach() + shift)
    moved = tsmc(model, shifted, potential, generator=generator(seed), **options)
    torch.testing.assert_close(moved.log_z, plain.log_z, rtol=0, atol=1e-9)
    assert torch.equal(moved.samples, plain.samples)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(sorted(SCHEMES)), st.sampled_from([0.0, 0.8, 0.95, 1.0]))
def test_evidence_is_unbiased_in_any_world(seed, scheme, ess_threshold):
    model, twist, potential = table_world(2, 3, seed)
    target = Target(model, potential)
    chances, population = every_path(model, twist, potential, 2, scheme, ess_threshold)
    assert (chances * population.log_z.exp()).sum().log().item() == pytest.approx(target.log_z, abs=1e-12)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.8, 1.0]))
def test_conditional_runs_are_unbiased_for_the_inverse_in_any_world(seed, ess_threshold):
    model, twist, potential = table_world(2, 3, seed)
    target = Target(model, potential)
    chances, population = every_conditional_path(model, twist, potential, target, 2, ess_threshold)
    assert (chances * (-population.log_z).exp()).sum().log().item() == pytest.approx(-target.log_z, abs=1e-12)


@quick
@given(worlds, st.integers(0, 10**6), st.sampled_from([1.0, 4.0]))
def test_every_generation_has_the_same_sigma_and_evidence(world, seed, scale):
    base, _, potential = world
    student = TableModel.random(base.table.shape[1], base.length, generator(seed), scale)
    first, later = Target(base, potential), Target(student, effective_potential(potential, base))
    assert later.log_z == pytest.approx(first.log_z, abs=1e-10)
    torch.testing.assert_close(later.log_sigma[-1], first.log_sigma[-1], rtol=0, atol=1e-10)


@quick
@given(worlds)
def test_levels_of_the_tree_agree(world):
    model, twist, potential = world
    target = Target(model, potential)
    for levels in (target.log_p, target.log_sigma, [level.detach() for level in target.tree.prefix_log_q(twist)]):
        for shorter, longer in itertools.pairwise(levels):
            summed = longer.view(len(shorter), -1).logsumexp(-1)
            torch.testing.assert_close(summed, shorter, rtol=0, atol=1e-10)
    sequences = target.tree.sequences()
    assert torch.equal(sequence_numbers(sequences, model.table.shape[1]), torch.arange(len(sequences)))
