"""Intervals by resampling whole runs: the value, copies of a run, coverage."""

import pytest
import torch
import torch.nn.functional as F
from worlds import generator

from eval.paper.bootstrap import bootstrap, mean_cosine, sums_of_runs
from eval.scorers.similarity import mean_pairwise_cosine


def texts(runs: int, sizes: list[int]):
    """Toxicity [N], vectors [N, D] of length other than one, and the run of each text."""
    source = generator(0)
    group = [run for run in range(runs) for _ in range(sizes[run % len(sizes)])]
    vectors = torch.randn(len(group), 7, generator=source) + 0.3
    return torch.rand(len(group), generator=source), vectors, group


def test_every_run_once_gives_the_mean_and_the_mean_pairwise_cosine():
    toxicity, vectors, group = texts(6, [3, 1, 5])
    found = bootstrap(toxicity, vectors, group, 50, generator(0))
    assert found["toxicity"][0] == pytest.approx(toxicity.double().mean().item(), abs=1e-12)
    assert found["similarity"][0] == pytest.approx(mean_pairwise_cosine(vectors), abs=1e-12)
    for value, low, high in found.values():
        assert low < value < high


def test_a_run_drawn_twice_adds_no_pairs_with_its_own_copy():
    _, vectors, group = texts(4, [2, 3])
    times = torch.tensor([[2.0, 0.0, 1.0, 1.0]], dtype=torch.float64)
    copies = [(i, copy) for i in range(len(group)) for copy in range(int(times[0, group[i]]))]
    unit = F.normalize(vectors.double(), dim=-1)
    pairs = [
        (unit[i] @ unit[j]).item()
        for a, (i, copy) in enumerate(copies)
        for b, (j, other) in enumerate(copies)
        if a != b and not (group[i] == group[j] and copy != other)
    ]
    count = sums_of_runs(group, torch.ones(len(group)))
    found = mean_cosine(times, sums_of_runs(group, unit), count)
    assert found.item() == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)


def cluster_world(runs: int, size: int, source: torch.Generator):
    """Runs whose texts are all alike; a direction common to all runs makes the similarity 1 / 2."""
    width = 200  # so wide that independent directions are almost orthogonal
    common = F.one_hot(torch.tensor(0), width).double()
    own = F.normalize(torch.randn(runs, 1, width, dtype=torch.float64, generator=source), dim=-1)
    side = (torch.rand(runs, 1, 1, dtype=torch.float64, generator=source) - 0.5) * 0.8
    vectors = F.normalize((1 + side) * common + own, dim=-1).expand(runs, size, width)
    toxicity = torch.rand(runs, 1, dtype=torch.float64, generator=source).expand(runs, size)
    group = [run for run in range(runs) for _ in range(size)]
    return toxicity.flatten(), vectors.flatten(0, 1), group


@pytest.mark.parametrize(("runs", "least", "most"), [(30, 0.88, 0.985), (8, 0.82, 0.93)])
def test_the_intervals_cover_though_the_particles_of_a_run_are_alike(runs, least, most):
    """With 30 runs as stated, with 8 less often: percentiles of few runs are too narrow."""
    source, size, trials = generator(1), 5, 300
    shared = torch.linspace(-0.4, 0.4, 100_001, dtype=torch.float64)
    cosine = ((1 + shared) / (1 + (1 + shared) ** 2).sqrt()).mean().square().item()  # of two runs
    within = (size - 1) / (runs * size - 1)  # share of pairs inside one run, at cosine 1
    truth = {"toxicity": 0.5, "similarity": within + (1 - within) * cosine}
    covered = dict.fromkeys(truth, 0)
    for _ in range(trials):
        found = bootstrap(*cluster_world(runs, size, source), 200, source)
        for name, value in truth.items():
            covered[name] += found[name][1] <= value <= found[name][2]
    for name, count in covered.items():
        assert least <= count / trials <= most, (name, count / trials)
