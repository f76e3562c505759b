"""The observer: what it records adds up to what the sampler returns."""

import pytest
import torch
from worlds import generator, table_world, traced

from tsmc.resampling import SCHEMES, normalise
from tsmc.sampler import tsmc
from tsmc.trace import Trace


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("ess_threshold", [1.0, 0.6, 0.0])
def test_genealogy_weights_and_tokens_rebuild_the_samples(scheme, ess_threshold):
    """Each step multiplies Z-hat by the mean of w under the weights from before it."""
    model, twist, potential = table_world(3, 5, seed=1)
    trace = Trace()
    options = (SCHEMES[scheme], ess_threshold, trace)
    population = tsmc(model, twist, potential, 7, generator(0), 4, *options)
    assert torch.equal(traced(trace), population.samples)
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
