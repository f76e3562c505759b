"""The sampler: runs that die, slices and chunks (test_mutants.py: it is unbiased)."""

import pytest
import torch
from worlds import ListedPotential, bias, generator, gpt_neo_world, hard_potential, table_world

from tinystories import decoder as decoders
from tsmc.draws import systematic
from tsmc.exact import TableTwist
from tsmc.sampler import Sigma, tsmc
from tsmc.streams import Streams, draw_population


def test_runs_that_die_where_phi_is_zero_almost_everywhere():
    model, twist, _ = table_world(2, 3, seed=6)
    potential = hard_potential({5: -1.0})
    assert bias(model, twist, potential) < 1e-12
    population = draw_population(Streams(), "x", None, Sigma(model, potential), twist, 3, 200)
    is_dead = ~population.is_alive()
    assert 0 < is_dead.sum() < 200 and not population.log_z.isnan().any()
    assert torch.equal(population.ess < 1, is_dead)
    alive = population.alive()
    assert len(alive.log_z) == (~is_dead).sum()
    assert (alive.samples == torch.tensor([1, 0, 1])).all()
    with pytest.raises(ValueError, match="all 6 runs of 2 particles ended with weight zero"):
        draw_population(Streams(), "x", None, Sigma(model, hard_potential({})), None, 2, 6)


@pytest.mark.parametrize("ess_threshold", [1.0, 0.5, 0.0])
def test_twist_that_rules_out_every_continuation_kills_the_particle_not_the_run(ess_threshold):
    model, twist, potential = table_world(2, 3, seed=6)
    with torch.no_grad():
        twist.log_psi[0] = 0.0
        twist.log_psi[1] = -torch.inf  # no token may follow the prefix (0,)
    nothing, nan = (TableTwist(torch.full_like(twist.log_psi, x)) for x in (-torch.inf, torch.nan))
    rule = {"runs": 100, "ess_threshold": ess_threshold}
    population = tsmc(model, twist, potential, 6, generator(0), **rule)
    alive = population.alive()
    assert len(alive.log_z) > 90 and not population.log_z.isnan().any()
    assert (alive.samples[..., 0] == 1).all()
    assert not tsmc(model, nothing, potential, 3, generator(0), **rule).is_alive().any()
    nan_potential = ListedPotential(torch.full((8,), torch.nan).double(), 2)
    for arguments in ((nan, potential), (twist, nan_potential)):
        with pytest.raises(ValueError, match="NaN"):
            tsmc(model, *arguments, 3, generator(0), **rule)


def test_logits_are_made_in_slices_of_bounded_size_with_the_same_results(monkeypatch):
    model, strong, potential = gpt_neo_world(5, 3, seed=2)
    sizes = []
    twist = lambda hidden: sizes.append(5 * len(hidden)) or strong(hidden)  # noqa: E731
    wanted = tsmc(model, twist, potential, 12, generator(2), 2)
    monkeypatch.setattr(decoders, "MAX_LOGITS", 40)
    found = tsmc(model, twist, potential, 12, generator(2), 2)
    torch.testing.assert_close(vars(found), vars(wanted))
    assert max(sizes[3:]) <= 40 < max(sizes[:3])


def test_runs_in_chunks_are_those_of_the_sampler_chunk_by_chunk():
    (model, twist, potential), streams = table_world(3, 4), Streams(seed=0, rows=20)
    given = (streams, "x", 1, Sigma(model, potential), twist, 5)
    rule = {"resample": systematic, "ess_threshold": 0.7}
    whole = draw_population(*given, 10, **rule)  # 4, 4 and 2 runs
    for n, runs in enumerate((4, 4, 2)):
        part = tsmc(model, twist, potential, 5, streams.stream("x", 1, n), runs, **rule)
        for name, values in vars(part).items():
            assert torch.equal(values, vars(whole)[name][4 * n :][:runs]), name
    with pytest.raises(ValueError, match="0 times 5 texts cannot be drawn"):
        draw_population(*given, 0)
    names = [("a", 0), ("a", 1), ("a", None), ("b", 0), ("a", 0, 0)]
    seeds = {Streams(seed).stream(*name).initial_seed() for seed in (0, 1) for name in names}
    assert len(seeds) == 10
