"""The sampler against enumeration: unbiased over all paths; edge cases, invariants."""

import pytest
import torch
import worlds
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import ADAPTIVE, bias, generator, hard_potential, table_world

from tinystories import InputError
from tsmc import interfaces
from tsmc.exact import TableTwist, Target
from tsmc.proposal import proposal_log_probs, sample_proposal, sequence_log_probs
from tsmc.resampling import SCHEMES, normalise
from tsmc.runs import Streams, draw_population
from tsmc.sampler import Sigma, tsmc
from tsmc.trace import Trace

EXACT = 1e-12  # rounding of float64


@pytest.mark.parametrize("ess_threshold", [1.0, ADAPTIVE, 0.0])
@pytest.mark.parametrize("scheme", ["multinomial", "systematic"])
@pytest.mark.parametrize("size", [2, 3])
def test_evidence_and_samples_are_unbiased_over_all_paths(size, scheme, ess_threshold):
    assert bias(*table_world(size, size, seed=2), 2, scheme, ess_threshold) < EXACT


@pytest.mark.parametrize("ess_threshold", [1.0, ADAPTIVE, 0.0])
def test_gpt_neo_with_its_cache_is_unbiased_over_all_paths(ess_threshold):
    model, twist, potential = worlds.gpt_neo_world(2, 3, seed=1)
    assert bias(model, twist, potential, 2, "multinomial", ess_threshold) < EXACT
    model.prompt = model.prompt[:1]
    assert bias(model, twist, potential, 2, "multinomial", ess_threshold) < EXACT


@pytest.mark.parametrize("scheme", SCHEMES)
def test_potential_that_is_zero_almost_everywhere(scheme):
    model, twist, _ = table_world(2, 3, seed=6)
    potential = hard_potential(2, 3, {5: -1.0})
    assert bias(model, twist, potential, 2, "multinomial", 1.0) < EXACT
    population = tsmc(model, twist, potential, 3, generator(0), 200, SCHEMES[scheme])
    dead = ~population.is_alive()
    assert 0 < dead.sum() < 200
    assert (population.ess[dead] == 0).all() and (population.ess[~dead] >= 1).all()
    assert not population.log_z.isnan().any()
    assert (worlds.sequence_numbers(population.samples[~dead].flatten(0, 1), 2) == 5).all()


@pytest.mark.parametrize("ess_threshold", [1.0, 0.5, 0.0])
def test_twist_that_rules_out_every_continuation_kills_the_particle_not_the_run(ess_threshold):
    model, twist, potential = table_world(2, 3, seed=6)
    with torch.no_grad():
        twist.log_psi[0] = 0.0
        twist.log_psi[1] = -torch.inf  # no token may follow the prefix (0,)
    options = {"runs": 100, "ess_threshold": ess_threshold}
    population = tsmc(model, twist, potential, 6, generator(0), **options)
    alive = population.is_alive()
    assert alive.sum() > 90 and not population.log_z.isnan().any()
    assert (population.samples[alive][..., 0] == 1).all()
    nothing = TableTwist(torch.full_like(twist.log_psi, -torch.inf))
    population = tsmc(model, nothing, potential, 3, generator(0), **options)
    assert (population.log_z == -torch.inf).all() and (population.ess == 0).all()


def test_nan_is_an_error_not_a_result():
    model, twist, potential = table_world(2, 3)
    nan_potential = worlds.ListedPotential(torch.full((8,), torch.nan).double(), 2)
    nan_twist = TableTwist(torch.full_like(twist.log_psi, torch.nan))
    for arguments in ((twist, nan_potential), (nan_twist, potential)):
        with pytest.raises(InputError, match="NaN"):
            tsmc(model, *arguments, 3, generator(0))


@pytest.mark.parametrize("limit", [1, 85])
def test_logits_are_made_in_slices_of_bounded_size_with_the_same_results(monkeypatch, limit):
    model, strong, potential = worlds.gpt_neo_world(5, 3, seed=2)
    sizes = []

    def twist(hidden):
        sizes.append(strong(hidden).numel())
        return strong(hidden)

    def results() -> list:
        batch = sample_proposal(model, twist, 30, generator(1))
        runs = tsmc(model, twist, potential, 12, generator(2), 2)
        log_probs = proposal_log_probs(model, twist, batch.tokens)
        log_p = sequence_log_probs(model, batch.tokens)
        return [batch.tokens, batch.log_p, batch.log_q, runs.tokens, runs.log_z, *log_probs, log_p]

    wanted = results()
    monkeypatch.setattr(interfaces, "MAX_LOGITS", limit)
    sizes.clear()
    for ours, whole in zip(results(), wanted, strict=True):
        torch.testing.assert_close(ours, whole)
    assert max(sizes) <= max(limit, 15)  # one sequence at least


def test_runs_in_chunks_are_those_of_the_sampler_chunk_by_chunk():
    world, streams = table_world(3, 4), Streams(seed=0, rows=20)
    sigma = Sigma(world[0], world[2])
    rule = {"resample": SCHEMES["systematic"], "ess_threshold": 0.7}
    whole = draw_population(streams, "x", 1, sigma, world[1], 5, 10, **rule)  # 4, 4 and 2 runs
    sizes = enumerate((4, 4, 2))
    parts = [tsmc(*world, 5, streams.stream("x", 1, n), size, **rule) for n, size in sizes]
    for name, values in vars(whole).items():
        assert torch.equal(values, torch.cat([getattr(part, name) for part in parts])), name
    one_at_a_time = draw_population(Streams(rows=1), "x", 1, sigma, world[1], 5, 3)
    assert len(one_at_a_time.log_z) == 3, "at least one run at a time"
    with pytest.raises(InputError, match="sample of size 0"):
        draw_population(streams, "x", 1, sigma, world[1], 5, 0)


def test_runs_that_die_are_left_out_and_refused_where_all_did():
    model, _, _ = table_world(2, 3)
    sigma = Sigma(model, hard_potential(2, 3, {}))
    with pytest.raises(InputError, match="all 6 runs of 2 particles ended with weight zero"):
        draw_population(Streams(), "x", None, sigma, None, 2, 6)
    sigma = Sigma(model, hard_potential(2, 3, {3: 0.0}))
    population = draw_population(Streams(), "x", None, sigma, None, 2, 60)
    living = population.is_alive()
    assert 0 < living.sum() < 60
    assert (population.alive().samples == torch.tensor([0, 1, 1])).all()
    assert len(population.alive().log_z) == living.sum()


def test_streams_of_other_names_seeds_and_generations_are_others():
    names = [("a", 0), ("a", 1), ("a", None), ("b", 0), ("a", 0, 0)]
    seeds = {Streams(seed).stream(*name).initial_seed() for seed in (0, 1) for name in names}
    assert len(seeds) == 10 and Streams(0).stream("a", 0).initial_seed() in seeds


sizes = st.integers(1, 4)
numbers = st.integers(0, 10**6)
random_worlds = st.builds(table_world, sizes, sizes, numbers, st.sampled_from([0.1, 1.0, 5.0]))
schemes = st.sampled_from(list(SCHEMES.values()))
choices = {"particles": st.integers(1, 8), "runs": sizes, "resample": schemes}
choices |= {"ess_threshold": st.sampled_from([0.0, 0.3, 0.8, 1.0])}
options = st.fixed_dictionaries(choices)
quick = settings(max_examples=25, deadline=None)


@quick
@given(random_worlds, options, numbers)
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
