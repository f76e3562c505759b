"""Intervals by resampling whole runs: the value itself, copies of a run, and coverage where particles depend on each other."""

import pytest
import torch
import torch.nn.functional as F
from worlds import generator

from eval.paper.bootstrap import bootstrap, run_sums, similarity_at, toxicity_at
from eval.scorers.similarity import mean_pairwise_cosine
from tinystories.errors import InputError


def texts(runs: int, sizes: list[int], seed: int = 0):
    """Toxicity [N], vectors [N, D] of length other than one, and the run of each text."""
    source = generator(seed)
    group = [run for run in range(runs) for _ in range(sizes[run % len(sizes)])]
    return torch.rand(len(group), generator=source), torch.randn(len(group), 7, generator=source) + 0.3, group


def test_every_run_once_gives_the_mean_and_the_mean_pairwise_cosine():
    toxicity, vectors, group = texts(6, [3, 1, 5])
    found = bootstrap(run_sums(toxicity, vectors, group), 50, generator(0))
    assert found["toxicity"]["value"] == pytest.approx(toxicity.double().mean().item(), abs=1e-12)
    assert found["similarity"]["value"] == pytest.approx(mean_pairwise_cosine(vectors), abs=1e-12)
    for row in found.values():
        assert row["low"] < row["value"] < row["high"]


def test_a_run_drawn_twice_adds_no_pairs_with_its_own_copy():
    toxicity, vectors, group = texts(4, [2, 3])
    times = torch.tensor([[2.0, 0.0, 1.0, 1.0]], dtype=torch.float64)
    copies = [(i, copy) for i in range(len(group)) for copy in range(int(times[0, group[i]]))]
    unit = F.normalize(vectors.double(), dim=-1)
    pairs = [
        (unit[i] @ unit[j]).item()
        for a, (i, copy) in enumerate(copies)
        for b, (j, other) in enumerate(copies)
        if a != b and not (group[i] == group[j] and copy != other)
    ]
    sums = run_sums(toxicity, vectors, group)
    assert similarity_at(sums, times).item() == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)
    assert toxicity_at(sums, times).item() == pytest.approx(
        sum(toxicity[i].item() for i, _ in copies) / len(copies), abs=1e-7
    )


def cluster_world(runs: int, size: int, source: torch.Generator):
    """Runs whose texts share most of their vector and of their toxicity; a common direction makes the similarity 1 / 2."""
    width = 200  # so wide that independent directions are all but orthogonal
    common = F.one_hot(torch.tensor(0), width).double()
    own = F.normalize(torch.randn(runs, 1, width, dtype=torch.float64, generator=source), dim=-1)
    side = (torch.rand(runs, 1, 1, dtype=torch.float64, generator=source) - 0.5) * 0.8
    vectors = F.normalize((1 + side) * common + own, dim=-1).expand(runs, size, width).flatten(0, 1)
    toxicity = torch.rand(runs, 1, dtype=torch.float64, generator=source).expand(runs, size).flatten()
    return toxicity, vectors, [run for run in range(runs) for _ in range(size)]


@pytest.mark.parametrize(("runs", "least", "most"), [(30, 0.88, 0.985), (8, 0.82, 0.93)])
def test_the_intervals_cover_though_the_particles_of_a_run_are_alike(runs, least, most):
    """With 30 runs as they say, with 8 a little less often: percentiles of few runs are too narrow."""
    source, size, trials = generator(1), 5, 300
    shared = torch.linspace(-0.4, 0.4, 100_001, dtype=torch.float64)
    alignment = ((1 + shared) / (1 + (1 + shared) ** 2).sqrt()).mean().square().item()  # cosine of two runs
    within = (size - 1) / (runs * size - 1)  # share of pairs inside one run, at cosine 1
    truth = {"toxicity": 0.5, "similarity": within + (1 - within) * alignment}
    covered = dict.fromkeys(truth, 0)
    for _ in range(trials):
        found = bootstrap(run_sums(*cluster_world(runs, size, source)), 200, source)
        for name, value in truth.items():
            covered[name] += found[name]["low"] <= value <= found[name]["high"]
    for name, count in covered.items():
        assert least <= count / trials <= most, (name, count / trials)


def test_one_text_has_no_similarity():
    with pytest.raises(InputError, match="similarity"):
        run_sums(torch.zeros(1), torch.ones(1, 3), [0])
