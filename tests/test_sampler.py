"""The sampler against enumeration: unbiased evidence and samples over all random paths, edge cases."""

import itertools

import pytest
import torch
from worlds import ListedPotential, every_path, generator, gpt_neo_world, sequence_numbers, table_world, tiny_gpt_neo

from tinystories import Conditional
from tinystories.errors import InputError
from tsmc import interfaces
from tsmc.categorical import uniforms
from tsmc.conditional import conditional_tsmc
from tsmc.exact import Target
from tsmc.proposal import propose
from tsmc.resampling import SCHEMES
from tsmc.sampler import tsmc
from tsmc.scoring import proposal_log_probs, sequence_log_probs
from tsmc.table import TableModel, TableTwist
from tsmc.trace import Trace
from tsmc.trajectories import sample_proposal, trajectories
from twist.mlp import TwistMLP
from twist.potential import base_potential, effective_potential

ADAPTIVE = 0.9  # two particles resample where the smaller weight is under a third


def assert_unbiased(model, twist, potential, target, particles, scheme, ess_threshold):
    """E[Z-hat] = Z, and E[Z-hat * share of samples equal to s] = Z sigma(s) for every sequence s."""
    chances, population = every_path(model, twist, potential, particles, scheme, ess_threshold)
    vocab_size = model.decoder(1).logits.shape[-1]
    assert chances.sum().item() == pytest.approx(1, abs=1e-12)
    evidence = chances * population.log_z.exp()  # [R]
    numbers = sequence_numbers(population.samples.flatten(0, 1), vocab_size).view(-1, particles)  # [R, K]
    measure = torch.zeros(vocab_size**model.length, dtype=torch.float64)
    measure.index_add_(0, numbers.flatten(), (evidence / particles).repeat_interleave(particles))
    torch.testing.assert_close(evidence.sum().log().item(), target.log_z, rtol=0, atol=1e-12)
    torch.testing.assert_close(measure, (target.log_sigma[-1] + target.log_z).exp(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("ess_threshold", [1.0, ADAPTIVE, 0.0])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("vocab_size", "length"), [(2, 2), (3, 3)])
def test_evidence_and_samples_are_unbiased_over_all_paths(vocab_size, length, scheme, ess_threshold):
    model, twist, potential = table_world(vocab_size, length, seed=2)
    assert_unbiased(model, twist, potential, Target(model, potential), 2, scheme, ess_threshold)


@pytest.mark.parametrize(("vocab_size", "length", "particles"), [(3, 2, 2), (2, 3, 3), (2, 4, 1), (2, 4, 2)])
def test_unbiased_in_other_worlds(vocab_size, length, particles):
    model, twist, potential = table_world(vocab_size, length, seed=2)
    assert_unbiased(model, twist, potential, Target(model, potential), particles, "systematic", ADAPTIVE)


def test_the_adaptive_world_has_all_kinds_of_paths():
    """Resampled, left alone with equal weights, and left alone with unequal ones, where the evidence is easy to get wrong."""
    model, twist, potential = table_world(3, 3, seed=2)
    trace = Trace()
    every_path(model, twist, potential, 2, "multinomial", ADAPTIVE, observer=trace)
    ess = trace.ess[1]
    assert (ess < ADAPTIVE * 2).any() and (ess > 1.999).any() and ((ess > ADAPTIVE * 2) & (ess < 1.999)).any()


@pytest.mark.parametrize("ess_threshold", [1.0, ADAPTIVE, 0.0])
def test_gpt_neo_with_its_cache_is_unbiased_over_all_paths(ess_threshold):
    model, twist, potential = gpt_neo_world(2, 3, seed=1)
    assert_unbiased(model, twist, potential, Target(model, potential), 2, "multinomial", ess_threshold)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_optimal_twist_knows_the_evidence_at_the_first_step(scheme):
    model, _, potential = table_world(3, 4, seed=11)
    target, trace = Target(model, potential), Trace()
    optimal = TableTwist(target.optimal_log_psi())
    population = tsmc(model, optimal, potential, 6, generator(0), 4, SCHEMES[scheme], observer=trace)
    torch.testing.assert_close(
        trace.log_w[0], torch.full((4, 6), target.log_z, dtype=torch.float64), rtol=0, atol=1e-10
    )
    torch.testing.assert_close(trace.log_w[1:], torch.zeros(3, 4, 6).double(), rtol=0, atol=1e-10)
    torch.testing.assert_close(
        population.log_z, torch.full((4,), target.log_z, dtype=torch.float64), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("ess_threshold", [1.0, 0.5, 0.0])
def test_a_constant_added_to_each_step_of_the_twist_changes_nothing(ess_threshold):
    model, twist, potential = table_world(3, 4, seed=2)
    shift = torch.tensor([3.0, -40.0, 0.7, 11.0]).double().repeat_interleave(torch.tensor([1, 3, 9, 27]))
    shifted = TableTwist(twist.log_psi.detach() + shift[:, None])
    plain = tsmc(model, twist, potential, 8, generator(0), 5, ess_threshold=ess_threshold)
    moved = tsmc(model, shifted, potential, 8, generator(0), 5, ess_threshold=ess_threshold)
    torch.testing.assert_close(moved.log_z, plain.log_z, rtol=0, atol=1e-10)
    assert torch.equal(moved.samples, plain.samples)


def test_generation_one_targets_the_same_sigma():
    base, twist, potential = table_world(2, 3, seed=21)
    student = TableModel.random(2, 3, generator(22))
    effective = effective_potential(potential, base)
    target = Target(base, potential)
    torch.testing.assert_close(Target(student, effective).log_sigma[-1], target.log_sigma[-1], rtol=0, atol=1e-12)
    for ess_threshold in (1.0, ADAPTIVE, 0.0):
        assert_unbiased(student, twist, effective, target, 2, "multinomial", ess_threshold)


def test_base_potential_is_the_listed_one():
    model, twist, potential = table_world(2, 2)
    same = tsmc(model, twist, base_potential(potential), 4, generator(0)).log_z
    torch.testing.assert_close(same, tsmc(model, twist, potential, 4, generator(0)).log_z)


@pytest.mark.parametrize(("particles", "length"), [(1, 3), (4, 1), (1, 1)])
def test_one_particle_and_one_token(particles, length):
    model, twist, potential = table_world(2, length, seed=4)
    assert_unbiased(model, twist, potential, Target(model, potential), particles, "multinomial", 1.0)


def test_one_token_prompt():
    model, twist, potential = gpt_neo_world(2, 2)
    model.prompt = model.prompt[:1]
    assert_unbiased(model, twist, potential, Target(model, potential), 2, "multinomial", 1.0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_potential_that_is_zero_almost_everywhere(scheme):
    model, twist, _ = table_world(2, 3, seed=6)
    log_phi = torch.full((8,), -torch.inf).double()
    log_phi[5] = -1.0
    potential = ListedPotential(log_phi, 2)
    assert_unbiased(model, twist, potential, Target(model, potential), 2, scheme, 1.0)
    population = tsmc(model, twist, potential, 3, generator(0), 200, SCHEMES[scheme])
    dead = population.log_z == -torch.inf
    assert 0 < dead.sum() < 200
    assert (population.ess[dead] == 0).all() and (population.ess[~dead] >= 1).all()
    assert not population.log_z.isnan().any()
    assert (sequence_numbers(population.samples[~dead].flatten(0, 1), 2) == 5).all()


def test_optimal_twist_of_a_zero_one_potential_only_draws_what_is_allowed():
    model, _, _ = table_world(2, 3, seed=6)
    log_phi = torch.full((8,), -torch.inf).double()
    log_phi[[1, 6]] = 0.0
    potential = ListedPotential(log_phi, 2)
    target = Target(model, potential)
    population = tsmc(model, TableTwist(target.optimal_log_psi()), potential, 10, generator(0), 50)
    assert set(sequence_numbers(population.tokens.flatten(0, 1), 2).tolist()) == {1, 6}
    torch.testing.assert_close(
        population.log_z, torch.full((50,), target.log_z, dtype=torch.float64), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("ess_threshold", [1.0, 0.5, 0.0])
def test_twist_that_rules_out_every_continuation_kills_the_particle_not_the_run(ess_threshold):
    model, twist, potential = table_world(2, 3, seed=6)
    with torch.no_grad():
        twist.log_psi[0] = 0.0
        twist.log_psi[1] = -torch.inf  # no token may follow the prefix (0,)
    population = tsmc(model, twist, potential, 6, generator(0), 100, ess_threshold=ess_threshold)
    alive = population.log_z > -torch.inf
    assert alive.sum() > 90 and not population.log_z.isnan().any()
    assert (population.samples[alive][..., 0] == 1).all()


def test_twist_that_rules_out_everything_gives_no_evidence():
    model, twist, potential = table_world(2, 2)
    nothing = TableTwist(torch.full_like(twist.log_psi, -torch.inf))
    population = tsmc(model, nothing, potential, 3, generator(0), 2)
    assert (population.log_z == -torch.inf).all() and (population.ess == 0).all()


@pytest.mark.parametrize(("log_phi", "log_z"), [(0.0, 0.0), (-1e4, -1e4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_potentials(log_phi, log_z, dtype):
    model, _, _ = table_world(2, 3)
    potential = ListedPotential(torch.full((8,), log_phi, dtype=dtype), 2)
    population = tsmc(model.to(dtype), None, potential, 7, generator(0), 3)
    torch.testing.assert_close(population.log_z, torch.full((3,), log_z, dtype=dtype), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(population.ess, torch.full((3,), 7, dtype=dtype), rtol=1e-6, atol=0)


def test_nan_is_an_error_not_a_result():
    model, twist, potential = table_world(2, 3)
    with pytest.raises(InputError, match="NaN"):
        tsmc(model, twist, ListedPotential(torch.full((8,), torch.nan).double(), 2), 3, generator(0))
    with pytest.raises(InputError, match="NaN"):
        tsmc(model, TableTwist(torch.full_like(twist.log_psi, torch.nan)), potential, 3, generator(0))


@pytest.mark.parametrize("options", [{"particles": 0}, {"runs": 0}, {"ess_threshold": 1.5}, {"ess_threshold": -0.1}])
def test_options_out_of_range_are_refused(options):
    model, twist, potential = table_world(2, 2)
    with pytest.raises(InputError):
        tsmc(model, twist, potential, generator=generator(0), **({"particles": 2} | options))


def test_the_seed_decides_everything():
    model, twist, potential = table_world(3, 4)
    first, again, other = (tsmc(model, twist, potential, 9, generator(seed), 3) for seed in (5, 5, 6))
    assert torch.equal(first.tokens, again.tokens) and torch.equal(first.log_z, again.log_z)
    assert not torch.equal(first.tokens, other.tokens)


def test_adaptive_resampling_goes_by_the_weights_since_the_last_resampling():
    model, twist, potential = table_world(3, 6, seed=8)
    trace, particles = Trace(), 6
    tsmc(model, twist, potential, particles, generator(0), 50, ess_threshold=0.7, observer=trace)
    assert (trace.ess[0] > 5.99).all()  # the first weight does not depend on the token
    gathered = torch.zeros(50, particles).double()
    itself = torch.arange(particles).expand(50, particles)
    for t in range(6):
        gathered = gathered + trace.log_w[t]
        weights = gathered.softmax(-1)
        ess = 1 / weights.square().sum(-1)
        torch.testing.assert_close(trace.ess[t], ess, rtol=1e-10, atol=0)
        resampled = (ess < 0.7 * particles) | torch.tensor(t == 5)
        assert torch.equal(trace.ancestors[t][~resampled], itself[~resampled])
        assert (trace.ancestors[t] != itself)[resampled].any(-1).all()  # by chance the identity is one in thousands
        gathered = torch.where(resampled[:, None], 0.0, gathered)
    assert 0.1 < (trace.ess[1:5] < 0.7 * particles).double().mean() < 0.9


def chi_square_p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """p value of counts [N] under probabilities [N] that are all positive."""
    expected = counts.sum() * probabilities
    statistic = ((counts - expected).square() / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2).item()


@pytest.mark.parametrize(("scheme", "ess_threshold"), [("multinomial", 1.0), ("systematic", 0.5), ("residual", 1.0)])
def test_samples_of_independent_runs_follow_sigma(scheme, ess_threshold):
    """One draw from each of 4000 runs; K = 100 leaves a bias far below what 4000 draws over 27 cells resolve. Level 1e-3."""
    model, twist, potential = table_world(3, 3, seed=13, scale=0.7)
    target, source = Target(model, potential), generator(17)
    counts = torch.zeros(27).double()
    for _ in range(8):
        population = tsmc(model, twist, potential, 100, source, 500, SCHEMES[scheme], ess_threshold)
        chosen = population.samples[torch.arange(500), torch.randint(100, (500,), generator=source)]
        counts += sequence_numbers(chosen, 3).bincount(minlength=27)
    assert chi_square_p_value(counts, target.log_sigma[-1].exp()) > 1e-3
    assert chi_square_p_value(counts, target.tree.prefix_log_q(None)[-1].exp()) < 1e-6  # the test can tell sigma from p


def test_proposal_draws_carry_their_own_probabilities():
    model, twist, _ = table_world(3, 3, seed=14)
    batch = sample_proposal(model, twist, 400, generator(0), keep_hidden=True)
    numbers = sequence_numbers(batch.tokens, 3)
    target = Target(model, ListedPotential(torch.zeros(27).double(), 3))
    torch.testing.assert_close(batch.log_q.sum(-1), target.tree.prefix_log_q(twist)[-1].detach()[numbers])
    torch.testing.assert_close(batch.log_p.sum(-1), target.tree.prefix_log_q(None)[-1][numbers])
    torch.testing.assert_close(batch.log_psi, twist.of_tokens(batch.hidden, batch.tokens).detach())


@pytest.mark.parametrize("cuts", [(0, 21), (0, 9, 21), (0, 6, 6, 18, 21)])
def test_rows_drawn_in_parts_are_those_drawn_at_once(cuts):
    model, strong, _ = gpt_neo_world(5, 3, seed=2)
    twist = lambda hidden: strong(hidden) / 5  # noqa: E731
    whole = sample_proposal(model, twist, 21, generator(3), keep_hidden=True)
    uniform = uniforms(63, 1, generator(3)).view(3, 21, 1)
    parts = [trajectories(model, twist, uniform[:, a:b], keep_hidden=True) for a, b in itertools.pairwise(cuts)]
    assert len(whole.tokens.unique(dim=0)) > 12, "rows that are mixed up show"
    for name in ("tokens", "log_p", "log_psi", "log_q", "hidden"):
        torch.testing.assert_close(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))


class Standing:
    """A decoder whose rows [N] stand at given states [S, D]; the logits there are a table's."""

    def __init__(self, table, states, state_of):
        self.states, self.state_of, self.table, self.vocab_size = states, state_of, table, table.shape[1]

    def logits_of(self, part):
        return self.table[part]


@pytest.mark.parametrize("limit", [1, 33, 10**6])
@pytest.mark.parametrize("size", [3, 11, 200])
@pytest.mark.parametrize("psi", [None, lambda hidden: hidden @ hidden.new_ones(2, 1) - hidden[:, :1]])
def test_rows_that_share_a_state_draw_what_they_would_draw_alone(monkeypatch, psi, size, limit):
    """Whatever the order of rows and states and in whatever chunks, with forced tokens among the drawn ones."""
    monkeypatch.setattr(interfaces, "MAX_LOGITS", limit)
    source = generator(size)
    table, states = (torch.randn(7, width, dtype=torch.float64, generator=source) for width in (size, 2))
    state_of = torch.randint(6, (50,), generator=source)  # at the last nobody stands
    forced = torch.randint(-size, size, (50,), generator=source).clamp(min=-1)
    twist = psi and (lambda hidden: psi(hidden) * torch.linspace(-1, 1, size, dtype=torch.float64))
    uniform, alone = uniforms(50, 1, source), torch.arange(50)
    together = propose(Standing(table, states, state_of), twist, uniform, forced)
    apart = propose(Standing(table[state_of], states[state_of], alone), twist, uniform, forced)
    assert len(together.tokens) == 50 and (together.tokens[forced >= 0] == forced[forced >= 0]).all()
    for name, values in vars(apart).items():
        torch.testing.assert_close(getattr(together, name), values)


class Meter:
    """A language model that notes the largest logits asked of it."""

    def __init__(self, model):
        self.model, self.length, self.vocab_size, self.most = model, model.length, model.vocab_size, 0

    def decoder(self, rows):
        decoder = self.model.decoder(rows)
        ask = decoder.logits_of
        decoder.logits_of = lambda rows: self.noted(ask(rows))
        return decoder

    def log_probs(self, tokens):
        log_p, logits, hidden = self.model.log_probs(tokens)
        return log_p, self.noted(logits), hidden

    def noted(self, logits):
        self.most = max(self.most, logits.numel())
        return logits


@pytest.mark.parametrize("limit", [1, 60, 85, 10**6])
def test_logits_are_made_in_chunks_of_bounded_size_with_the_same_results(monkeypatch, limit):
    model, twist, _ = gpt_neo_world(5, 3, seed=2)
    reference = torch.tensor([[1, 0, 4], [2, 2, 2]])

    def potential(tokens, log_p):
        return -tokens.double().mean(-1)

    def results():
        batch = sample_proposal(meter, twist, 30, generator(1))
        population = conditional_tsmc(meter, twist, potential, reference, 12, generator(2))
        log_p, log_q = proposal_log_probs(meter, twist, batch.tokens)
        pair = [batch.tokens, batch.log_p, batch.log_q, population.tokens, population.log_z, log_p, log_q]
        return [*pair, sequence_log_probs(meter, batch.tokens), *proposal_log_probs(meter, None, batch.tokens)]

    meter = Meter(model)
    wanted = results()
    monkeypatch.setattr(interfaces, "MAX_LOGITS", limit)
    meter.most = 0
    for ours, whole in zip(results(), wanted, strict=True):
        torch.testing.assert_close(ours, whole)
    assert meter.most <= max(limit, 15)  # one sequence at least


@pytest.mark.parametrize("ess_threshold", [1.0, 0.5, 0.0])
def test_bfloat16_networks_keep_weights_and_evidence_in_float32(ess_threshold):
    model, source = (
        Conditional(tiny_gpt_neo(7, hidden_size=16).to(torch.bfloat16), torch.tensor([1, 2]), 5),
        generator(0),
    )
    twist = TwistMLP(16, 12, 7, source)
    torch.nn.init.normal_(twist.last.weight, generator=source)
    for psi in (twist, twist.to(torch.bfloat16)):
        population = tsmc(
            model, psi, lambda s, log_p: -s.float().mean(-1), 40, generator(1), 3, ess_threshold=ess_threshold
        )
        assert population.log_z.dtype == population.log_weights.dtype == torch.float32
        assert population.log_z.isfinite().all() and (population.ess >= 1).all()
        batch = sample_proposal(model, psi, 30, generator(2), keep_hidden=True)
        assert batch.log_q.dtype == torch.float32 and batch.hidden.dtype == torch.bfloat16
        torch.testing.assert_close(psi.of_tokens(batch.hidden, batch.tokens), batch.log_psi, rtol=0.05, atol=0.05)
