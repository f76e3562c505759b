"""What is ours: the pool, its adapter, forced draws, DPG, RL. The core needs none of it."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import worlds
from tables import TableModel, TableTwist
from torch.nn.functional import logsigmoid, one_hot
from worlds import INF, generator, log_q, random_model, rare_potential, table_world

from beyond import forced, levels, pooled, report, study
from beyond.dpg import DPG, DPGOptions
from beyond.pooled import Adapted, Pool, Texts
from beyond.rl import RL
from beyond.two_sided import holding_log_z
from distill.pair import Pair
from eval.evaluate import DRAW, KL
from eval.options import Options, read_options
from eval.world import World
from main import LEARNERS
from tests.exact import Target, Tree, kl_divergence
from tinystories.load import write_json
from tsmc.estimate import mean_estimate
from tsmc.proposal import proposal_log_probs, sample_proposal
from tsmc.sampler import Rule, tsmc
from tsmc.sigma import Sigma
from tsmc.streams import Streams
from twist.ctl import draw_batch

ROOT = Path(__file__).parents[1]
BASE = worlds.tiny_conditional(0, (4,))
TARGET = Target(BASE, rare_potential)


def test_the_core_never_imports_what_is_beyond():
    for folder in ("tinystories", "tsmc", "twist", "distill", "eval"):
        for path in (ROOT / folder).glob("*.py"):
            assert not re.search(r"(?m)^ *(from|import) (beyond|main)\b", path.read_text()), path
    named = [line for line in (ROOT / "main.py").read_text().splitlines() if "beyond" in line]
    assert all(re.match(r'    "\w+": "beyond\.\w+:\w+",$|LEARNERS = ', line) for line in named)


SIZES = {"pool_first_draws": 200, "pool_first_rounds": 4, "pool_first_ess": 0.5}
SIZES |= {"pool_first_updates": 20, "pool_draws": 600, "pool_updates": 50}
OPTIONS = pooled.PooledOptions(**SIZES, pool_learning_rate=4e-5, pool_held_out=0.2)


@pytest.mark.learned
def test_pooled_brings_the_proposal_closer_to_sigma_by_weights_that_are_unbiased():
    """KL(sigma||q) over that of p^(0), its mean over two seeds; all weights are p^(0) phi / q."""
    kl = []
    for seed in range(2):
        learner = pooled.Pooled(BASE, rare_potential, OPTIONS, Streams(seed))
        first = learner.learn_twist(BASE, 0)
        assert learner.scored(0) == 200
        second = learner.learn_twist(learner.distil(first, 1), 1)
        assert learner.scored(1) == 800 == len(learner.pool.tokens)
        kl.append([kl_divergence(TARGET.log_sigma[-1], log_q(pair)) for pair in (first, second)])
        drawn = worlds.sequence_numbers(learner.pool.tokens[200:], 7)  # by the first pair
        log_w = TARGET.log_sigma[-1] + TARGET.log_z - log_q(first)
        weights = learner.pool.log_weights[200:].float()
        torch.testing.assert_close(weights, log_w[drawn])
        error = 5 * weights.exp().std() / 600**0.5
        assert abs(weights.exp().mean() - math.exp(TARGET.log_z)) < error
    means = torch.tensor(kl).mean(0) / kl_divergence(TARGET.log_sigma[-1], TARGET.log_p[-1])
    assert (means < torch.tensor([0.55, 0.38])).all(), means


def test_weights_are_truncated_as_little_as_the_ess_allows():
    log_weights = 3 * torch.randn(1000, generator=generator(0), dtype=torch.float64)
    untouched = log_weights.softmax(0)
    ess = 1 / untouched.square().sum().item()
    torch.testing.assert_close(pooled.truncated(log_weights, 0.9 * ess / 1000), untouched)
    weights = pooled.truncated(log_weights, 4 * ess / 1000)
    assert 1 / weights.square().sum().item() == pytest.approx(4 * ess, rel=1e-6)
    ratios = (weights / untouched)[weights < weights.max() * (1 - 1e-9)]
    torch.testing.assert_close(ratios, ratios[:1].expand_as(ratios))
    some = torch.tensor([0.0, -5.0, -INF, -INF]).double()
    assert pooled.truncated(some, 1.0).tolist() == [0.5, 0.5, 0.0, 0.0]


def test_tempered_weights_have_the_largest_power_that_the_ess_allows():
    """Where every sequence occurs once with weight p phi, they are p phi^b; no dead one counts."""
    model, _, potential = table_world(3, 3, seed=1, scale=2.0)
    log_p, log_phi = Target(model, potential).log_p[-1], potential.log_phi
    powers = list(pooled.POWERS)
    enough = [b for b in powers if 1 / (log_p + b * log_phi).softmax(0).square().sum() >= 0.5 * 27]
    for dead in (torch.empty(0), torch.full((100,), -INF)):
        both = [torch.cat([one, dead.double()]) for one in (log_p + log_phi, log_phi)]
        log_weights, power = pooled.tempered(Pool(both[0], *both), 0.5)
        assert power == max(enough) and 0.01 < power < 1
        torch.testing.assert_close(log_weights, torch.cat([log_p + power * log_phi, dead.double()]))


def test_the_adapter_moves_what_the_head_of_p_reads_and_texts_share_their_prefixes(monkeypatch):
    monkeypatch.setattr(pooled, "GROUP", 4)
    scores, hidden = torch.linspace(-1, 2, 7), torch.randn(3, 8, generator=generator(2))
    for given in (None, scores):
        q = Adapted(BASE, given, generator(0))
        torch.testing.assert_close(log_q(Pair(q, None)), log_q(Pair(BASE, None)))
    torch.nn.init.normal_(q.network.last.weight, std=0.1, generator=generator(2))
    moved = q.network(hidden)
    wanted = BASE.logits(hidden + moved[:, :8]) + moved[:, 8:] * scores
    torch.testing.assert_close(q.logits(hidden), wanted)
    tokens = sample_proposal(BASE, None, 9, generator(1)).tokens
    rows = torch.tensor([8, 1, 1, 5])
    weights = torch.tensor([0.5, 1.0, 2.0, 0.0])
    losses = list(Texts(BASE, tokens).losses(q, rows, weights))
    assert len(losses) > 1
    torch.testing.assert_close(sum(losses), -weights @ q.log_probs(tokens[rows]).sum(1))


def test_texts_held_out_are_learned_in_no_copy():
    tokens = torch.arange(400).repeat(2)[:, None].expand(-1, 2)
    weights = torch.arange(800.0) * (torch.arange(800) % 400 > 9)  # ten texts have none
    is_held, held, held_weights = pooled.hold_out(tokens, weights, 0.25, generator(0))
    assert 60 < len(held) < 140 and torch.equal(is_held[:400], is_held[400:])
    assert sorted(held[:, 0].tolist()) == is_held[:400].nonzero()[:, 0].tolist()
    assert held[:, 0].min() > 9 and torch.equal(held_weights, 2.0 * held[:, 0] + 400)
    assert not pooled.hold_out(tokens, weights, 0.01, generator(0))[0].any()  # they are too few


@pytest.mark.learned
def test_the_surrogate_finds_the_tokens_that_phi_depends_on():
    """Tokens 30 to 39 never occur, and have scores from embeddings."""
    embeddings = torch.randn(40, 3, generator=generator(1))
    # Neither the mean of embeddings nor their size matters.
    layer = SimpleNamespace(weight=1e-3 * embeddings + 5.0)
    network = SimpleNamespace(get_output_embeddings=lambda: layer)
    scores = embeddings @ torch.tensor([1.0, -1.0, 0.5])
    tokens = torch.randint(30, (2000, 5), generator=generator(0))
    log_phi = 8 * logsigmoid(one_hot(tokens, 40).amax(1).float() @ scores - 2)
    for known, rows in ((network, slice(30, 40)), (None, slice(30))):
        base = SimpleNamespace(network=known, vocab_size=40)
        found = pooled.fit_surrogate(base, tokens, log_phi)
        assert torch.corrcoef(torch.stack([found[rows], scores[rows]]))[0, 1] > 0.95


WORLDS = {  # pieces, the ends
    "overlaps itself": ([[1, 1]], ()),
    "one holds another": ([[1, 0], [0], [2, 2, 1]], ()),
    "more than the end": ([[2, 1], [1, 0]], (2,)),
    "two ends, and no room": ([[0, 1], [1] * 6], (0, 2)),
}


@pytest.mark.learned
@pytest.mark.parametrize("name", WORLDS)
def test_forced_draws_have_their_density_and_hold_a_piece(name):
    """By frequencies of all texts, whatever kappa and R are."""
    pieces, end = WORLDS[name]
    model, draws = random_model(5, end), forced.Forced(random_model(5, end), pieces, generator(0))
    draws.later *= 0.3  # as a pilot might have it
    tree = Tree(model)
    texts = tree.sequences[tree.prefix_log_q()[-1] > -INF]  # [S, T]
    p = model.log_probs(texts).sum(1).exp()
    q = p * draws.log_over_p(texts).exp()
    assert q.sum().item() == pytest.approx(1)
    tokens, log_ratio = draws.draw(20_000, generator(2))
    number = (tokens[:, None] == texts).all(2).int().argmax(1)  # [N]
    torch.testing.assert_close(log_ratio, ((p + q) / 2 / p).log()[number])
    for part, law in ((number[:10_000], p), (number[10_000:], q)):
        expected = len(part) * law
        surprise = part.bincount(minlength=len(texts)) - expected
        assert (surprise[law == 0] == 0).all()
        assert (surprise / (expected * (1 - law)).clamp(min=1).sqrt()).abs().max() < 6
    holds = sum((texts.unfold(1, len(b), 1) == b).all(2).any(1) for b in draws.pieces) > 0
    assert q[holds].sum() > (0.99 if not end else p[holds].sum())


def test_forced_draws_are_weighted_and_printed(capsys):
    """A word that p never writes: about 1e-15 of its texts have it."""
    sizes = ["--runs", "12", "--samples", "10", "--length", "12"]
    forced.main(["--potential", "keyword:submarine", *sizes])
    first, second, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("1 in ") and -40 < float(re.match(r"log Z (-\S+) ", second)[1]) < -30
    assert sum("submarine" in line.lower() for line in lines) == 10


@pytest.mark.learned
@pytest.mark.parametrize("end", [(), (1,)])
def test_the_objective_of_dpg_is_the_likelihood_of_q_under_sigma(end):
    model, twist, potential = table_world(3, 3, seed=1, scale=0.8, end=end)
    sigma, source, target = Sigma(model, model, potential), generator(2), Target(model, potential)
    exact_log_q = target.tree.prefix_log_q(twist)[-1]  # [V^T]
    loss = -torch.where(target.log_sigma[-1] > -INF, exact_log_q, 0.0)
    (exact,) = torch.autograd.grad((target.log_sigma[-1].exp() * loss).sum(), twist.log_psi)
    loss = DPG(model, potential, DPGOptions(), Streams(0)).twist_loss
    drawn = [loss(twist, draw_batch(sigma, twist, 2000, source), model) for _ in range(40)]
    gradients = torch.stack([torch.autograd.grad(one, twist.log_psi)[0] for one in drawn])
    mean, error = gradients.mean(0), gradients.std(0) / 40**0.5
    assert ((mean - exact).abs() <= 5 * error + 1e-12).all()
    assert (mean.abs() > 20 * error).any()  # it can tell the gradient from none


@pytest.mark.learned
def test_rl_approaches_sigma():
    base, _, potential = worlds.gpt_neo_world(3, 3)
    target = Target(base, potential)
    learner = RL(base, potential, Options(learning_rate=2e-2, updates=30), Streams(0))
    kl = kl_divergence(log_q(learner.learn_twist(base, 0)), target.log_sigma[-1])
    assert kl < 0.2 * kl_divergence(target.log_p[-1], target.log_sigma[-1])


PAGE = """<!-- table -->
|  | toxicity | KL, fresh | end alone | acceptance rate |
| --- | --- | --- | --- | --- |
| paper 1 | old | old | old | |
| paper 0 → paper 1 | | | | |
<!-- end -->
<!-- table b- -->
|  | toxicity |
| --- | --- |
| generation 1 (paper) | |
<!-- end -->
<!-- table -->
|  | toxicity |
| --- | --- |
| generation 1 (paper) | |
| as all (q) say <!-- paper 1 --> | |
<!-- end -->
"""


def test_the_level_of_a_beginning_is_the_mean_of_phi(monkeypatch):
    monkeypatch.setattr(levels, "FINISHED", 20_000)
    model, twist, potential = table_world(3, 4)
    world, beginning = World(model, potential, {}, None), torch.tensor([1, 2])
    found = levels.log_mean_phi(world, Pair(model, twist), beginning, generator(0))
    ends = torch.cartesian_prod(torch.arange(3), torch.arange(3))  # [9, 2]
    tokens = torch.cat([beginning.expand(9, -1), ends], 1)
    exact = (model.log_probs(tokens)[:, 2:].sum(1) + potential(tokens)).logsumexp(0)
    assert found == pytest.approx(exact.item(), abs=0.03)
    other = TableModel.random(3, 4, generator(5))  # p^(1)
    sigma = Sigma(other, model, potential)
    log_p = lambda tokens: other.log_probs(tokens).sum(1)  # noqa: E731
    best = Target(other, lambda tokens: sigma.log_potential(tokens, log_p(tokens)))
    pair = Pair(other, TableTwist.optimal(best))
    trained = SimpleNamespace(world=world, pair=pair, options=Options(seed=1))
    monkeypatch.setattr(levels, "STEPS", (1, 2, 3))
    row = levels.compare_levels(trained, pair)  # the best twist is right about every level
    assert all(row[f"correlation {t}"] > 0.999 for t in (1, 2, 3))
    log_psi = sample_proposal(other, pair.twist, levels.BEGINNINGS, generator(1)).log_psi[:, 1]
    good = (log_psi > log_psi.max() - math.log(100)).double().mean().item()
    assert row["good 2"] == pytest.approx(good) and 0 < good < 1


@pytest.mark.parametrize("threshold", [1.0, 0.9, 0.0])
def test_runs_that_hold_a_sample_of_sigma_bound_log_z_from_above(threshold):
    """Over such runs the mean of 1 / Z-hat is 1 / Z, under every rule; that of log Z-hat is above
    log Z by at least the KL of a draw, which from one particle is that of q."""
    base, twist, potential = table_world(3, 4, scale=0.5)
    other = TableModel(base.table + 0.3 * TableModel.random(3, 4, generator(5)).table, 4)  # p^(1)
    sigma, target = Sigma(other, base, potential), Target(base, potential)
    rule = Rule(ess_threshold=threshold)
    size = (20_000, 3)  # R, K
    held = target.log_sigma[-1].exp().multinomial(size[0], True, generator=generator(1))  # [R]
    held = target.tree.sequences[held]  # [R, T]
    log_z = holding_log_z(sigma, twist, held, size[1], generator(2), rule)
    inverse = mean_estimate((target.log_z - log_z).exp())
    assert abs(inverse.value - 1) < 4 * inverse.std_error < 0.03
    plain = tsmc(sigma, twist, size[1], generator(3), size[0], rule)
    assert plain.log_z.mean() < target.log_z - 0.02 and log_z.mean() > target.log_z + 0.02
    number = (plain.samples * torch.tensor([27, 9, 3, 1])).sum(-1).flatten()  # [R K] of a text
    counts = number.bincount(minlength=81) + 0.5  # the law of a draw; no text counts as impossible
    log_law = (counts / counts.sum()).log().double()
    kl = kl_divergence(target.log_sigma[-1], log_law)
    assert kl < log_z.mean() - target.log_z + 0.01
    one = holding_log_z(sigma, twist, held, 1, generator(4), rule).mean() - target.log_z
    log_q = proposal_log_probs(other, twist, target.tree.sequences)[1]
    exact = kl_divergence(target.log_sigma[-1], log_q)
    assert one == pytest.approx(exact.item(), abs=0.05)


def test_a_study_measures_jobs_and_fills_its_tables(tmp_path, monkeypatch, finished_job):
    """Every command of it is understood. Student's t with one degree of freedom is 12.71."""
    for options, _ in study.RUNS.values():
        read_options(options.split(), LEARNERS, "")
    job, rule = finished_job("paper"), {"end alone": ("systematic", 0.0)}
    monkeypatch.setattr(study, "RULES", rule)
    monkeypatch.setattr(study, "DRAWN", (4, 8))
    for name, few in (("STEPS", (2,)), ("BEGINNINGS", 3), ("FINISHED", 4)):
        monkeypatch.setattr(levels, name, few)
    monkeypatch.setattr(study, "FRESH", job / "target")
    record = study.measured(job, "paper") | {"name": "paper"}
    first, last = record["generations"]
    assert last["kl_fresh"] == pytest.approx(last[KL], abs=1e-4)
    assert -0.1 < last["draws"][8] < last[DRAW] < last[KL] - 0.05  # weights repair a part
    assert sum(record["histograms"]["Base"]) == 16 and 0 < last["worth"] <= 1
    first |= {"toxicity": 0.25, "kl_fresh": 2.5}
    record["rules"][1]["end alone"]["score"] = 0.25
    for seed, toxicity in ((91, 0.5), (92, 0.6)):
        last |= {"toxicity": toxicity, "kl_fresh": 2.0}
        write_json(tmp_path / f"paper-{seed}.json", record | {"seed": seed})
    rows = report.read_records(tmp_path)
    filled = report.fill(PAGE, rows).splitlines()
    one, change, other, alike, named = (filled[n] for n in (3, 4, 9, 14, 15))
    assert other == "| generation 1 (paper) |  |"  # of b-paper, which has no record
    assert alike == "| generation 1 (paper) | 0.550 ± 0.635 |"
    assert named == "| as all (q) say <!-- paper 1 --> | 0.550 ± 0.635 |"
    assert one == "| paper 1 | 0.550 ± 0.635 | 2.00 | 0.250 |  |"
    assert change.startswith("| paper 0 → paper 1 | 0.300 ± 0.635 | -0.50 | ")
    report.draw_study(rows, tmp_path, ["end alone"])
    assert len(list(tmp_path.glob("*.png"))) == 5
