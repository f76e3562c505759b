"""The sampler against enumeration: unbiased evidence and samples over all paths, and edge cases."""

import pytest
import torch
import worlds
from worlds import ADAPTIVE, bias, generator, hard_potential, mean_inverse, table_world

from tinystories import InputError
from tsmc import interfaces
from tsmc.exact import TableTwist, Target
from tsmc.proposal import proposal_log_probs, sample_proposal, sequence_log_probs
from tsmc.resampling import SCHEMES
from tsmc.runs import Phases, draw_population
from tsmc.sampler import Sigma, tsmc

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


WRONG = [{"particles": 0}, {"runs": 0}, {"ess_threshold": 1.5}, {"ess_threshold": -0.1}]
WRONG += [{"reference": torch.zeros(shape).long()} for shape in [(3, 1), (3, 3), (3,), (3, 2, 1)]]
WRONG += [{"reference": torch.full((3, 2), -1)}]


@pytest.mark.parametrize("options", WRONG)
@pytest.mark.parametrize("is_conditional", [False, True])
def test_options_out_of_range_are_refused(options, is_conditional):
    model, twist, potential = table_world(2, 2)
    sizes = {"particles": 2, "runs": 3} | options
    if is_conditional:
        sizes = {"reference": torch.zeros(sizes["runs"], 2).long()} | sizes
    words = "reference h(as shape|olds a negative)" if "reference" in options else "give|must be"
    with pytest.raises(InputError, match=words):
        tsmc(model, twist, potential, generator=generator(0), **sizes)


@pytest.mark.parametrize("ess_threshold", [1.0, 0.5])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_shares_of_samples_times_z_hat_are_unbiased(scheme, ess_threshold):
    """Of every last token v: the mean over runs is Z_sigma sigma(s_T = v) under any scheme."""
    model, twist, potential = table_world(3, 3, seed=13, scale=0.7)
    target, options = Target(model, potential), (SCHEMES[scheme], ess_threshold)
    population = tsmc(model, twist, potential, 8, generator(17), 4000, *options)
    shares = torch.nn.functional.one_hot(population.samples[..., -1], 3).double().mean(1)  # [R, V]
    values = shares * (population.log_z - target.log_z).exp()[:, None]
    error = values.std(0) / 4000**0.5
    sigma, p = target.token_marginals()[-1].exp(), target.log_p[-1].exp().view(9, 3).sum(0)
    assert ((values.mean(0) - sigma) / error).abs().max() < 4
    assert ((values.mean(0) - p) / error).abs().max() > 5, "it can tell sigma from p"


@pytest.mark.parametrize("limit", [1, 60, 85, 10**6])
def test_logits_are_made_in_slices_of_bounded_size_with_the_same_results(monkeypatch, limit):
    model, strong, potential = worlds.gpt_neo_world(5, 3, seed=2)
    reference = torch.tensor([[1, 0, 4], [2, 2, 2]])
    sizes = []

    def twist(hidden):
        sizes.append(strong(hidden).numel())
        return strong(hidden)

    def results() -> list:
        batch = sample_proposal(model, twist, 30, generator(1))
        runs = tsmc(model, twist, potential, 12, generator(2), 2, reference=reference)
        log_probs = proposal_log_probs(model, twist, batch.tokens)
        log_p = sequence_log_probs(model, batch.tokens)
        return [batch.tokens, batch.log_p, batch.log_q, runs.tokens, runs.log_z, *log_probs, log_p]

    wanted = results()
    monkeypatch.setattr(interfaces, "MAX_LOGITS", limit)
    sizes.clear()
    for ours, whole in zip(results(), wanted, strict=True):
        torch.testing.assert_close(ours, whole)
    assert max(sizes) <= max(limit, 15)  # one sequence at least


SIZES = [(length, 2, ess) for length in (2, 3) for ess in (1.0, ADAPTIVE, 0.0)]
SIZES += [(2, 3, 1.0), (3, 1, 1.0)]


@pytest.mark.parametrize(("length", "particles", "ess_threshold"), SIZES)
def test_the_mean_of_one_over_z_hat_is_that_of_one_over_z(length, particles, ess_threshold):
    world = table_world(length, length, seed=2)
    mean = mean_inverse(*world, particles, ess_threshold=ess_threshold)
    assert mean == pytest.approx(1, abs=EXACT)


@pytest.mark.parametrize(("length", "particles"), [(3, 2), (2, 3), (3, 1)])
@pytest.mark.parametrize("ess_threshold", [1.0, ADAPTIVE, 0.0])
def test_where_runs_can_die_it_is_the_chance_to_live_over_z(length, particles, ess_threshold):
    model, twist, _ = table_world(2, length, seed=6)
    potential = hard_potential(2, length, {2: -1.0, 2**length - 2: -0.3})
    world = (model, twist, potential, particles, "multinomial", ess_threshold)
    chances, population = worlds.every_path(*world)
    alive = chances[population.is_alive()].sum().item()
    assert 0.05 < alive < 0.95
    assert mean_inverse(*world) == pytest.approx(alive, abs=EXACT)


def test_runs_in_chunks_are_those_of_the_sampler_chunk_by_chunk():
    world, phases = table_world(3, 4), Phases(seed=0, rows=20)
    sigma = Sigma(world[0], world[2])
    rule = {"resample": SCHEMES["systematic"], "ess_threshold": 0.7}
    whole = draw_population(phases, "x", 1, sigma, world[1], 5, 10, **rule)  # 4, 4 and 2 runs
    streams = [phases.stream("x", 1, number) for number in range(3)]
    sizes = zip(streams, (4, 4, 2), strict=True)
    parts = [tsmc(*world, 5, source, size, **rule) for source, size in sizes]
    for name, values in vars(whole).items():
        assert torch.equal(values, torch.cat([getattr(part, name) for part in parts])), name
    one_at_a_time = draw_population(Phases(rows=1), "x", 1, sigma, world[1], 5, 3)
    assert len(one_at_a_time.log_z) == 3, "at least one run at a time"
    with pytest.raises(InputError, match="sample of size 0"):
        draw_population(phases, "x", 1, sigma, world[1], 5, 0)


def test_runs_that_die_are_left_out_and_refused_where_all_did():
    model, _, _ = table_world(2, 3)
    sigma = Sigma(model, hard_potential(2, 3, {}))
    with pytest.raises(InputError, match="all 6 runs of 2 particles ended with weight zero"):
        draw_population(Phases(), "x", None, sigma, None, 2, 6)
    sigma = Sigma(model, hard_potential(2, 3, {3: 0.0}))
    population = draw_population(Phases(), "x", None, sigma, None, 2, 60)
    living = population.is_alive()
    assert 0 < living.sum() < 60
    assert (population.alive().samples == torch.tensor([0, 1, 1])).all()
    assert len(population.alive().log_z) == living.sum()


def test_streams_of_other_names_seeds_and_generations_are_others():
    names = [("a", 0), ("a", 1), ("a", None), ("b", 0), ("a", 0, 0)]
    seeds = {Phases(seed).stream(*name).initial_seed() for seed in (0, 1) for name in names}
    assert len(seeds) == 10 and Phases(0).stream("a", 0).initial_seed() in seeds
