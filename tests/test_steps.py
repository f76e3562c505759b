"""Steps and chunks, and what is drawn in chunks: runs of the sampler, samples of a bare model, exact samples."""

import math

import pytest
import torch
from worlds import ListedPotential, generator, in_chunks, table_world

from tinystories.errors import InputError
from tsmc.rejection import log_mean_with_error, rejection_sample
from tsmc.resampling import SCHEMES
from tsmc.runs import sample_model, sample_runs
from tsmc.sampler import Sigma, tsmc
from tsmc.steps import Chunks, Steps
from tsmc.trajectories import sample_proposal

SIZES = {0: 4, 1: 4, 2: 2}  # of ten in chunks of four


def streams(chunk: int) -> torch.Generator:
    """A stream for each chunk."""
    return generator(100 + chunk)


class Noted(Chunks):
    """Chunks that keep what is reported."""

    def __init__(self, *options):
        super().__init__(*options)
        self.reports: list[dict] = []

    def report(self, **figures):
        self.reports.append({name: float(value) for name, value in figures.items()})


def test_steps_are_numbered_and_refuse_figures_that_are_not_finite():
    steps, seen = Steps(3, "DPO"), []
    for step in steps:
        seen.append(step)
        steps.report(loss=-0.5, ess=torch.tensor(1e30))
        for bad in (math.nan, math.inf, torch.tensor(-math.inf)):
            words = rf"^DPO, step {step + 1}: loss is {float(bad)}; lower the learning rate$"
            with pytest.raises(InputError, match=words):
                steps.report(ess=1.0, loss=bad)
    assert seen == [0, 1, 2] and len(steps) == 3


@pytest.mark.parametrize(
    ("total", "at_once", "sizes"),
    [(10, 4, [4, 4, 2]), (8, 4, [4, 4]), (3, 5, [3]), (3, 0, [1, 1, 1]), (0, 4, [])],
)
def test_chunks_cover_the_sample_each_with_its_own_stream(total, at_once, sizes):
    sources = [generator(chunk) for chunk in range(len(sizes))]
    chunks = Chunks(total, at_once, sources.__getitem__)
    seen = []
    for size, source in chunks:
        chunks.keep(numbers=torch.arange(sum(size for size, _ in seen), sum(size for size, _ in seen) + size))
        seen.append((size, source))
    assert [size for size, _ in seen] == sizes and chunks.total == total
    assert all(source is wanted for (_, source), wanted in zip(seen, sources, strict=True))
    assert not sizes or torch.equal(chunks.kept()["numbers"], torch.arange(total))


def test_runs_in_chunks_are_those_of_the_sampler_chunk_by_chunk():
    model, twist, potential = table_world(3, 4)
    chunks, options = Noted(10, 4, streams), (SCHEMES["systematic"], 0.7)
    population = sample_runs(Sigma(model, potential), twist, 5, chunks, *options)
    parts = [tsmc(model, twist, potential, 5, streams(chunk), size, *options) for chunk, size in SIZES.items()]
    for name, values in vars(population).items():
        assert torch.equal(values, torch.cat([getattr(part, name) for part in parts])), name
    assert chunks.reports == [{"ess": part.ess.mean().item()} for part in parts]
    every_step = sample_runs(Sigma(model, potential), twist, 5, Chunks(10, 4, streams))
    assert not torch.equal(every_step.log_z, population.log_z), "the options make a difference"


def test_runs_that_die_are_left_out_by_alive_and_refused_where_all_did():
    model, _, _ = table_world(2, 3)
    log_phi = torch.full((8,), -torch.inf).double()
    with pytest.raises(InputError, match="all 6 runs of 2 particles ended with weight zero"):
        sample_runs(Sigma(model, ListedPotential(log_phi, 2)), None, 2, Chunks(6, 4, streams))
    log_phi[3] = 0.0
    population = sample_runs(Sigma(model, ListedPotential(log_phi, 2)), None, 2, Chunks(60, 40, streams))
    living = population.is_alive()
    assert 0 < living.sum() < 60
    for name, values in vars(population.alive()).items():
        assert torch.equal(values, getattr(population, name)[living])
    assert (population.alive().samples == torch.tensor([0, 1, 1])).all()


def test_samples_of_a_bare_model_in_chunks_are_those_of_the_proposal():
    model, _, _ = table_world(3, 4)
    parts = [sample_proposal(model, None, size, streams(chunk)).tokens for chunk, size in SIZES.items()]
    assert torch.equal(sample_model(model, Chunks(10, 4, streams)), torch.cat(parts))


def test_rejection_in_chunks_is_that_of_every_chunk_put_together():
    model, _, potential = table_world(3, 4, scale=0.5)
    chunks = Noted(10, 4, streams)
    exact = rejection_sample(model, potential, chunks)
    parts = [rejection_sample(model, potential, in_chunks(size, 9, streams(i))) for i, size in SIZES.items()]
    assert torch.equal(exact.tokens, torch.cat([part.tokens for part in parts]))
    assert torch.equal(exact.log_phi, torch.cat([part.log_phi for part in parts]))
    assert [report["accepted"] for report in chunks.reports] == [len(part.tokens) for part in parts]
    proposals = torch.cat([sample_proposal(model, None, size, streams(i)).tokens for i, size in SIZES.items()])
    assert (exact.log_z, exact.log_z_std_error) == log_mean_with_error(potential(proposals))
    assert exact.num_proposals == 10 and 0 < len(exact.tokens) < 10
