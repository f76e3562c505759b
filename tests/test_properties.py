"""Invariants over random worlds and options, and what an observer records."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import generator, table_world

from tsmc.exact import TableTwist, Target
from tsmc.resampling import SCHEMES, normalise
from tsmc.sampler import tsmc
from tsmc.trace import Trace

sizes = st.integers(1, 4)
numbers = st.integers(0, 10**6)
worlds = st.builds(table_world, sizes, sizes, numbers, st.sampled_from([0.1, 1.0, 5.0]))
schemes = st.sampled_from(list(SCHEMES.values()))
choices = {"particles": st.integers(1, 8), "runs": sizes, "resample": schemes}
choices |= {"ess_threshold": st.sampled_from([0.0, 0.3, 0.8, 1.0])}
options = st.fixed_dictionaries(choices)
quick = settings(max_examples=25, deadline=None)


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
@given(worlds, options, numbers, st.lists(st.floats(-50, 50), min_size=4, max_size=4))
def test_a_constant_in_each_step_of_the_twist_changes_nothing(world, options, seed, constants):
    model, twist, potential = world
    widths = torch.tensor([model.vocab_size**t for t in range(model.length)])
    shift = torch.tensor(constants[: model.length]).double().repeat_interleave(widths)
    shifted = TableTwist(twist.log_psi.detach() + shift[:, None])
    plain = tsmc(model, twist, potential, generator=generator(seed), **options)
    moved = tsmc(model, shifted, potential, generator=generator(seed), **options)
    torch.testing.assert_close(moved.log_z, plain.log_z, rtol=0, atol=1e-9)
    assert torch.equal(moved.samples, plain.samples)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("ess_threshold", [1.0, 0.6, 0.0])
def test_genealogy_weights_and_tokens_rebuild_the_samples(scheme, ess_threshold):
    """Each step multiplies Z-hat by the mean of w under the weights from before it."""
    model, twist, potential = table_world(3, 5, seed=1)
    trace = Trace()
    options = (SCHEMES[scheme], ess_threshold, trace)
    population = tsmc(model, twist, potential, 7, generator(0), 4, *options)
    samples = trace.tokens.gather(2, trace.lineages()).permute(1, 2, 0)  # [R, K, T]
    assert torch.equal(samples, population.samples)
    assert trace.tokens.shape == trace.log_w.shape == trace.ancestors.shape == (5, 4, 7)
    torch.testing.assert_close(trace.log_weights[-1], population.log_weights)
    torch.testing.assert_close(trace.ess[-1], population.ess)
    assert torch.equal(trace.log_z[-1], population.log_z)
    before = normalise(trace.log_weights - trace.log_w)  # [T, R, K]
    gained = (before * trace.log_w.exp()).sum(-1).log()
    torch.testing.assert_close(trace.log_z, gained.cumsum(0))
