"""The sampler: runs that die, slices and chunks (test_mutants.py: it is unbiased)."""

import pytest
import torch
from worlds import ListedPotential, bias, generator, gpt_neo_world, hard_potential, table_world

from tinystories import decoder as decoders
from tsmc.draws import SCHEMES
from tsmc.exact import TableTwist
from tsmc.sampler import Sigma, tsmc
from tsmc.streams import Streams, draw_population


def test_runs_that_die_where_phi_is_zero_almost_everywhere():
    model, twist, _ = table_world(2, 3, seed=6)
    potential = hard_potential({5: -1.0})
    assert bias(model, twist, potential) < 1e-12
    sigma = Sigma(model, potential)
    population = draw_population(Streams(), "x", None, sigma, twist, 3, 200)
    dead = ~population.is_alive()
    assert 0 < dead.sum() < 200
    assert (population.ess[dead] == 0).all() and (population.ess[~dead] >= 1).all()
    assert not population.log_z.isnan().any()
    alive = population.alive()
    assert (alive.samples == torch.tensor([1, 0, 1])).all() and len(alive.log_z) == 200 - dead.sum()
    sigma = Sigma(model, hard_potential({}))
    with pytest.raises(ValueError, match="all 6 runs of 2 particles ended with weight zero"):
        draw_population(Streams(), "x", None, sigma, None, 2, 6)


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
    assert (tsmc(model, nothing, potential, 3, generator(0), **options).log_z == -torch.inf).all()
    nan_twist = TableTwist(torch.full_like(twist.log_psi, torch.nan))
    nan_potential = ListedPotential(torch.full((8,), torch.nan).double(), 2)
    for arguments in ((nan_twist, potential), (twist, nan_potential)):
        with pytest.raises(ValueError, match="NaN"):
            tsmc(model, *arguments, 3, generator(0), **options)


def test_logits_are_made_in_slices_of_bounded_size_with_the_same_results(monkeypatch):
    model, strong, potential = gpt_neo_world(5, 3, seed=2)
    sizes = []

    def twist(hidden):
        sizes.append(strong(hidden).numel())
        return strong(hidden)

    wanted = tsmc(model, twist, potential, 12, generator(2), 2)
    monkeypatch.setattr(decoders, "MAX_LOGITS", 85)
    sizes.clear()
    found = tsmc(model, twist, potential, 12, generator(2), 2)
    torch.testing.assert_close(vars(found), vars(wanted))
    assert max(sizes) <= 85


def test_runs_in_chunks_are_those_of_the_sampler_chunk_by_chunk():
    world, streams = table_world(3, 4), Streams(seed=0, rows=20)
    sigma = Sigma(world[0], world[2])
    rule = {"resample": SCHEMES["systematic"], "ess_threshold": 0.7}
    whole = draw_population(streams, "x", 1, sigma, world[1], 5, 10, **rule)  # 4, 4 and 2 runs
    sizes = enumerate((4, 4, 2))
    parts = [tsmc(*world, 5, streams.stream("x", 1, n), size, **rule) for n, size in sizes]
    for name, values in vars(whole).items():
        assert torch.equal(values, torch.cat([getattr(part, name) for part in parts])), name
    with pytest.raises(ValueError, match="0 runs of 5 particles cannot be drawn"):
        draw_population(streams, "x", 1, sigma, world[1], 5, 0)
    names = [("a", 0), ("a", 1), ("a", None), ("b", 0), ("a", 0, 0)]
    seeds = {Streams(seed).stream(*name).initial_seed() for seed in (0, 1) for name in names}
    assert len(seeds) == 10 and Streams(0).stream("a", 0).initial_seed() in seeds
