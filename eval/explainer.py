"""The data of `docs/explainer.html`: `python -m eval.explainer` replaces it inside the page.

The page runs the sampler in the world of `docs/tiny.py`, whose random log p^(0) is rounded before a
learner runs on it. It gets, for N prefixes that can grow, V letters and T steps,

    base               one character for each log p^(0)(s_t | s_{1:t-1}) [N, V]: its index in
                       ALPHABET is -SCALE log p^(0), rounded
    paper, weighted    generations of Algorithm 1 (eq. 5 to 8)
      rows, log_p        the rows in which p^(m) differs from p^(m-1), written as in base
      log_psi, longer    [T][V][V] log psi^(m) by step, previous letter (one row at t = 1) and
                         letter, after the CTL of tiny.py and after LONGER times as many updates
    pooled             rounds: those of its ladder, then one for each further generation
      words              three characters for each word drawn, its number in the base 64
      power, log_cap     b of the tempered target p^(0) phi^b, log c of the truncated weights
      U, a, g            the next q, p^(0) with an adapter, and the scores of the surrogate: one for
                         each pair of places i < t and of the letters there, G in all

    q(s_t | s_{1:t-1}) = softmax(log p^(0) + U[t, s_{t-1}] + a[t] sum_{i<t} g[i, t, s_i, s_t])
"""

import importlib.util
import json
import string
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from tinystories.checkpoint import write_text
from tsmc.exact import TableModel, TableTwist, all_sequences
from twist.pool import draw_round, joined, tempered, truncated
from twist.surrogate import fit_surrogate

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "explainer.html"
BEGIN = '<script type="application/json" id="data">\n'
ALPHABET = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+-"
SCALE = 8.75  # the finest grid that holds every log p
LONGER = 4  # times as many updates of CTL
LADDER = 8  # rounds, the last of which is generation 0
DRAWS = [250] * LADDER + [500] * 3  # words of every round
LADDER_ESS, LEAST_ESS = 0.1, 0.05  # which b and c are the largest for, as in distill/pooled.py
RIDGE = 0.03  # penalty of U^2 / 2 and a^2 / 2


def load_tiny() -> ModuleType:
    """A copy of `docs/tiny.py`, which is in no package."""
    spec = importlib.util.spec_from_file_location("tiny", DOCS / "tiny.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tiny = load_tiny()


def rounded(log_p: Tensor) -> Tensor:
    """Indices in ALPHABET [N, V] of log probabilities [N, V]."""
    return (-SCALE * log_p).round().long().clamp(max=len(ALPHABET) - 1)


def spelled(codes: Tensor) -> str:
    """Indices in ALPHABET as one text."""
    return "".join(ALPHABET[code] for code in codes.flatten().tolist())


def passing(words: Tensor, weights: Tensor) -> Tensor:
    """The weight [N, V] of words [n] that begin with a prefix and letter; weights are [n]."""
    share = weights.new_zeros(1 + tiny.N * tiny.V)  # [S]
    for _ in range(tiny.T):
        share.index_add_(0, words, weights)
        words = (words - 1) // tiny.V  # one letter shorter
    return tiny.children(share)


def weighted(logits: Tensor, log_phi: Tensor, generator: torch.Generator):
    """Algorithm 1, resampled at the last letter alone: yields log p^(m) and log psi^(m), both [S].

    Particles are distilled with their weights, as `tiny.self_distilled_tsmc` distils copies.
    """
    log_p_base = log_p = tiny.language_model(logits)
    for _ in range(tiny.GENERATIONS + 1):
        log_phi_m = tiny.effective_potential(log_p_base, log_phi, log_p)  # [V^T]
        log_psi, _ = tiny.learn_twist(log_p, log_phi_m, generator)
        yield log_p, log_psi
        log_q, _ = tiny.proposal(log_p, log_psi)
        words = torch.zeros(tiny.RUNS, tiny.PARTICLES, dtype=torch.long)
        for _ in range(tiny.T):
            words = tiny.extend(words, log_q, generator)  # [R, K]
        log_weights = (tiny.joint(log_p) - tiny.joint(log_q))[words] + log_phi_m[words - tiny.N]
        weights = log_weights.softmax(1) / tiny.RUNS  # all runs count the same
        share = passing(words.flatten(), weights.flatten())
        for _ in range(tiny.MODEL_STEPS):
            step = share - share.sum(-1, keepdim=True) * logits.softmax(-1)
            logits = logits + tiny.MODEL_RATE * step
        log_p = tiny.language_model(logits)


def fit_adapter(logits: Tensor, sums: Tensor, share: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted eq. 7 for the weights [N, V] that pass each letter: U, a and log psi [N, V].

    U [T V, V] and a [T], both rounded, shift the logits [N, V] of p^(0); sums [N, V] are those of g
    over earlier letters. q is the proposal of log psi = U + a g.
    """
    step = torch.arange(tiny.T).repeat_interleave(torch.tensor(tiny.COUNTS[:-1]))  # [N]
    context = step * tiny.V + (torch.arange(tiny.N) - 1) % tiny.V  # [N]
    shift = torch.zeros(tiny.T * tiny.V, tiny.V).double().requires_grad_()
    strength = torch.zeros(tiny.T).double().requires_grad_()
    learned = [shift, strength]
    optimizer = torch.optim.LBFGS(learned, max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        log_q = (logits + shift[context] + strength[step, None] * sums).log_softmax(-1)
        penalty = RIDGE / 2 * sum(values.square().sum() for values in learned)
        total = penalty - (share * log_q).sum()
        total.backward()
        return total

    optimizer.step(loss)
    shift, strength = (values.detach().round(decimals=3) for values in learned)
    return shift, strength, shift[context] + strength[step, None] * sums


def pooled(base: TableModel, log_phi: Tensor) -> list[dict]:
    """The rounds of the pooled learner, for log phi of all words [V^T]."""
    generator, draws, twist, rounds = torch.Generator().manual_seed(0), [], None, []
    digits = tiny.V ** torch.arange(tiny.T).flip(0)  # of a word's number
    places = [(i, t) for t in range(tiny.T) for i in range(t)]
    offsets = tiny.V**2 * torch.arange(len(places))
    for number, count in enumerate(DRAWS, 1):
        drawn = draw_round(base, twist, lambda s: log_phi[s @ digits], count, generator)
        draws.append(drawn)
        pool = joined(draws)
        log_weights, power = pool.log_weights, 1.0
        if number < LADDER:
            log_weights, power = tempered(pool, LADDER_ESS)
        weights = truncated(log_weights, LEAST_ESS)
        # Pairs of letters take the place of single tokens in the surrogate.
        pairs = [pool.tokens[:, [i, t]] @ digits[-2:] for i, t in places]
        entries = torch.stack(pairs, 1) + offsets  # [n, T (T - 1) / 2] of g
        size = len(places) * tiny.V**2
        scores = fit_surrogate(entries, pool.log_phi, tiny.BETA, size).double().round(decimals=2)
        sums = torch.zeros_like(base.table)  # [N, V] of g over the letters so far
        tables = iter(scores.view(-1, tiny.V, tiny.V))
        for t, some in enumerate(sums.split(tiny.COUNTS[:-1])):
            for letters in all_sequences(tiny.V, t).T:  # t of [V^t]
                some += next(tables)[letters]
        share = passing(tiny.N + pool.tokens @ digits, weights)
        shift, strength, log_psi = fit_adapter(base.table, sums, share)
        twist = TableTwist(log_psi)
        words = (drawn.tokens @ digits)[:, None] // 64 ** torch.arange(2, -1, -1) % 64  # [n, 3]
        log_cap = log_weights.min() + (weights.max() / weights.min()).log()
        rounds.append({"words": spelled(words), "power": power, "log_cap": log_cap.item()})
        rounds[-1] |= {"U": shift.tolist(), "a": strength.tolist(), "g": scores.tolist()}
    return rounds


def generations(algorithm: Iterable[tuple], codes: Tensor, log_phi: Tensor) -> list[dict]:
    """Each generation that an algorithm yields, for p^(0) by its indices in ALPHABET [N, V]."""
    log_p_base = tiny.language_model(-codes.double() / SCALE)
    generator = torch.Generator().manual_seed(0)
    longer = load_tiny()
    longer.TWIST_STEPS *= LONGER
    found = []
    for m, (log_p, log_psi, *_) in enumerate(algorithm):
        own = rounded(tiny.children(log_p)) if m > 0 else codes
        rows = (own != codes).any(1).nonzero()[:, 0].tolist()
        log_phi_m = tiny.effective_potential(log_p_base, log_phi, log_p)
        twists = {"log_psi": log_psi, "longer": longer.learn_twist(log_p, log_phi_m, generator)[0]}
        found.append({"rows": rows, "log_p": spelled(own[rows])})
        for name, twist in twists.items():
            steps = tiny.children(twist).split(tiny.COUNTS[:-1])  # T of [V^t, V]
            # The first V prefixes of a step end in the V letters.
            found[-1][name] = [step[: tiny.V].round(decimals=3).tolist() for step in steps]
        codes = own
    return found


def world_data() -> dict:
    """The world of `docs/tiny.py` and what the three learners learn in it."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(tiny.N, tiny.V, dtype=torch.float64, generator=generator)
    codes = rounded(logits.log_softmax(-1))  # [N, V]
    words = all_sequences(tiny.V, tiny.T)  # [V^T, T]
    broken = (words != words.flip(1)).sum(1).double() / 2  # each pair is counted twice
    log_phi = -tiny.BETA * broken
    base = TableModel(-codes.double() / SCALE, tiny.T).requires_grad_(False)
    start = generator.clone_state()  # so that psi^(0) of both is the same
    paper = tiny.self_distilled_tsmc(base.table, log_phi, generator)
    resampled_last = weighted(base.table, log_phi, start)
    data = {"letters": tiny.V, "length": tiny.T, "beta": tiny.BETA, "alphabet": ALPHABET}
    data |= {"scale": SCALE, "ladder": LADDER, "base": spelled(codes)}
    data["paper"] = generations(paper, codes, log_phi)
    data["weighted"] = generations(resampled_last, codes, log_phi)
    return data | {"pooled": pooled(base, log_phi)}


def page(data: dict) -> str:
    """The page that exists, with other data."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return before + BEGIN + text + rest[rest.index("\n</script>") :]


if __name__ == "__main__":
    write_text(PAGE, page(world_data()))
