"""Invariants over random worlds and options, and what an observer records."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import generator, table_world

from tsmc.exact import TableModel, TableTwist, Target
from tsmc.resampling import SCHEMES, normalise
from tsmc.sampler import tsmc
from tsmc.trace import Trace
from twist.potential import effective_potential

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


@quick
@given(worlds, numbers, st.sampled_from([1.0, 4.0]))
def test_every_generation_has_the_same_sigma_and_evidence(world, seed, scale):
    base, _, potential = world
    student = TableModel.random(base.vocab_size, base.length, generator(seed), scale)
    first, later = Target(base, potential), Target(student, effective_potential(potential, base))
    assert later.log_z == pytest.approx(first.log_z, abs=1e-10)
    torch.testing.assert_close(later.log_sigma[-1], first.log_sigma[-1], rtol=0, atol=1e-10)


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


def test_unique_ancestors_counts_distinct_lineages():
    model, twist, potential = table_world(2, 4, seed=2)
    trace = Trace()
    tsmc(model, twist, potential, 5, generator(0), 3, observer=trace)
    counted = [[len(set(line)) for line in step] for step in trace.lineages().tolist()]
    assert trace.unique_ancestors().tolist() == counted
    assert (trace.unique_ancestors().diff(dim=0) >= 0).all()  # backwards lineages only merge


def test_without_resampling_every_particle_keeps_its_lineage_and_its_twist():
    model, twist, potential = table_world(3, 4, seed=2)
    trace = Trace()
    options = {"runs": 3, "ess_threshold": 0.0, "observer": trace}
    population = tsmc(model, twist, potential, 5, generator(0), **options)
    assert torch.equal(trace.ancestors[:-1], torch.arange(5).expand(3, 3, 5))
    torch.testing.assert_close(trace.log_weights[-1], trace.log_w.sum(0))
    tokens = population.tokens.flatten(0, 1)  # [R K, T]
    log_psi = twist(model.log_probs(tokens)[2]).gather(-1, tokens[..., None]).squeeze(-1)
    torch.testing.assert_close(trace.log_psi.flatten(1).T, log_psi)


def test_observing_changes_nothing_and_a_trace_serves_one_call():
    model, twist, potential = table_world(2, 3, seed=3)
    trace = Trace()
    arguments = (model, twist, potential, 5)
    observed = tsmc(*arguments, generator(0), 2, observer=trace)
    assert torch.equal(observed.tokens, tsmc(*arguments, generator(0), 2).tokens)
    with pytest.raises(ValueError, match="new Trace"):
        tsmc(*arguments, generator(0), 2, observer=trace)
