"""The data of `docs/explainer.html`: `python -m eval.viewer.explainer` replaces it inside the page.

The page runs the sampler in the world of `docs/tiny.py`, whose random log p^(0) is rounded before
Algorithm 1 runs on it. N prefixes can grow, V letters, T steps. It gets of each generation m

    rows     the prefixes whose row of p^(m) differs from that of p^(m-1); null for all prefixes
    log_p    one character for each log p^(m)(s_t | s_{1:t-1}) of these rows: its index in ALPHABET
             is -SCALE log p, rounded
    log_psi  [T][V][V] log psi^(m) by step, previous letter (one row at t = 1) and letter

In the same world the pooled learner takes the rounds of its ladder, then one for each further
generation. Its q is p^(0) with an adapter, U and a, and with scores g of the surrogate or without:

    q(s_t | s_{1:t-1}) = softmax(log p^(0) + U[t, s_{t-1}] + a[t] sum_{i<t} g[i, t, s_i, s_t])

g has one number for each pair of places i < t and of the letters there, G in all. Each round has

    words         three characters for each word drawn, its number in the base 64
    power, log_cap   b of the tempered target p^(0) phi^b, log c of the truncated weights
    U, a, g       the next q: [T V][V], [T] and [G] or null
"""

import importlib.util
import json
import string
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from tinystories.checkpoint import write_text
from tsmc.exact import TableModel, all_sequences
from twist.pool import Pool, draw_round, tempered, truncated
from twist.surrogate import fit_surrogate

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "explainer.html"
BEGIN = '<script type="application/json" id="data">\n'
ALPHABET = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+-"
SCALE = 8.75  # the finest grid that holds every log p
LADDER = 8  # rounds, the last of which is generation 0
DRAWS = [250] * LADDER + [500] * 3  # words of every round
LADDER_ESS, LEAST_ESS = 0.1, 0.05  # which b and c are the largest for, as in distill/pooled.py
RIDGE = 0.03  # penalty of U^2 / 2 and a^2 / 2


def load_tiny() -> ModuleType:
    """`docs/tiny.py`, which is in no package."""
    spec = importlib.util.spec_from_file_location("tiny", DOCS / "tiny.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rounded(log_p: Tensor) -> Tensor:
    """Indices in ALPHABET [N, V] of log probabilities [N, V]."""
    return (-SCALE * log_p).round().long().clamp(max=len(ALPHABET) - 1)


def world_data() -> dict:
    """The world of `docs/tiny.py` and all generations of Algorithm 1 in it."""
    tiny = load_tiny()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(tiny.N, tiny.V, dtype=torch.float64, generator=generator)
    codes = rounded(logits.log_softmax(-1))  # [N, V]
    words = all_sequences(tiny.V, tiny.T)  # [V^T, T]
    broken = (words != words.flip(1)).sum(1).double() / 2  # each pair is counted twice
    potential = -tiny.BETA * broken
    base = TableModel(-codes.double() / SCALE, tiny.T).requires_grad_(False)
    algorithm = tiny.self_distilled_tsmc(base.table, potential, generator)
    generations = []
    for m, (log_p, log_psi, *_) in enumerate(algorithm):
        own = codes if m == 0 else rounded(tiny.children(log_p))
        rows = None if m == 0 else (own != codes).any(1).nonzero()[:, 0].tolist()
        listed = own if rows is None else own[rows]
        text = "".join(ALPHABET[code] for code in listed.flatten().tolist())
        codes = own
        steps = tiny.children(log_psi).split(tiny.COUNTS[:-1])  # T of [V^t, V]
        # The first V prefixes of a step end in the V letters.
        twist = [step[: tiny.V].round(decimals=3).tolist() for step in steps]
        generations.append({"rows": rows, "log_p": text, "log_psi": twist})
    about = {"letters": tiny.V, "length": tiny.T, "beta": tiny.BETA}
    about |= {"alphabet": ALPHABET, "scale": SCALE, "ladder": LADDER, "generations": generations}
    scales = {"with": tiny.BETA, "without": None}  # of the surrogate
    return about | {"pools": {name: pooled(base, potential, scales[name]) for name in scales}}


class Adapter(torch.nn.Module):
    """log psi = U + a g of every prefix and letter: q is the proposal of this twist on p^(0)."""

    def __init__(self, base: TableModel, scores: Tensor | None):
        """U = a = 0, for p^(0) = base and the scores g [G] of the surrogate."""
        super().__init__()
        vocab_size, length = base.vocab_size, base.length
        self.shift = torch.nn.Parameter(torch.zeros(length * vocab_size, vocab_size).double())
        self.strength = torch.nn.Parameter(torch.zeros(length).double())
        counts = vocab_size ** torch.arange(length)  # prefixes of each length
        self.step = torch.arange(length).repeat_interleave(counts)  # [N]
        self.row = self.step * vocab_size + (torch.arange(len(self.step)) - 1) % vocab_size  # [N]
        self.sums = torch.zeros_like(base.table)  # [N, V] of g over the letters so far
        if scores is not None:
            tables = iter(scores.view(-1, vocab_size, vocab_size))
            for t, sums in enumerate(self.sums.split(counts.tolist())):
                letters = all_sequences(vocab_size, t)  # [V^t, t]
                for i in range(t):
                    sums += next(tables)[letters[:, i]]

    def forward(self, hidden: Tensor) -> Tensor:
        """log psi [..., V] after the prefixes numbered hidden [..., 1]."""
        n = hidden.squeeze(-1).long()
        return self.shift[self.row[n]] + self.strength[self.step[n], None] * self.sums[n]

    def fit(self, base: TableModel, tokens: Tensor, weights: Tensor) -> None:
        """The weighted eq. 7 for words [N, T] with weights [N]; U and a are rounded."""
        learned = list(self.parameters())
        optimizer = torch.optim.LBFGS(learned, max_iter=100, line_search_fn="strong_wolfe")
        _, logits, hidden = base.log_probs(tokens)  # [N, T, V], [N, T, 1]

        def loss() -> Tensor:
            optimizer.zero_grad()
            log_q = (logits + self(hidden)).log_softmax(-1).gather(-1, tokens[..., None])
            penalty = sum(values.square().sum() for values in learned)
            total = RIDGE / 2 * penalty - weights @ log_q.sum((1, 2))
            total.backward()
            return total

        optimizer.step(loss)
        for values in learned:
            values.data = values.data.round(decimals=3)


def letter_pairs(tokens: Tensor, vocab_size: int) -> Tensor:
    """The entries of g that words [N, T] have, in place of single tokens: [N, T (T - 1) / 2]."""
    places = [(i, t) for t in range(tokens.shape[1]) for i in range(t)]
    pairs = [tokens[:, i] * vocab_size + tokens[:, t] for i, t in places]
    return torch.stack(pairs, 1) + vocab_size**2 * torch.arange(len(places))


def pooled(base: TableModel, log_phi: Tensor, scale: float | None) -> list[dict]:
    """The rounds of the pooled learner, for log phi of all words [V^T] and c of the surrogate."""
    generator, pool, adapter, rounds = torch.Generator().manual_seed(0), Pool(), None, []
    places = base.vocab_size ** torch.arange(base.length).flip(0)
    for number, count in enumerate(DRAWS, 1):
        drawn = draw_round(base, adapter, lambda s: log_phi[s @ places], count, generator)
        pool.rounds.append(drawn)
        scores = None
        if scale is not None:
            pairs = letter_pairs(pool.tokens(), base.vocab_size)  # [N, T (T - 1) / 2]
            entries = pairs.shape[1] * base.vocab_size**2
            scores, _ = fit_surrogate(pairs, pool.log_phi(), scale, entries)
            scores = scores.double().round(decimals=2)
        log_weights, power = pool.log_weights(), 1.0
        if number < LADDER:
            log_weights, power = tempered(pool, LADDER_ESS)
        weights = truncated(log_weights, LEAST_ESS)
        adapter = Adapter(base, scores)
        adapter.fit(base, pool.tokens(), weights)
        codes = (drawn.tokens @ places)[:, None] // 64 ** torch.arange(2, -1, -1) % 64  # [N, 3]
        log_cap = log_weights.min() + (weights.max() / weights.min()).log()
        rounds.append(
            {
                "words": "".join(ALPHABET[code] for code in codes.flatten().tolist()),
                "power": power,
                "log_cap": log_cap.item(),
                "U": adapter.shift.tolist(),
                "a": adapter.strength.tolist(),
                "g": None if scores is None else scores.tolist(),
            }
        )
    return rounds


def page(data: dict) -> str:
    """The page that exists, with other data."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return before + BEGIN + text + rest[rest.index("\n</script>") :]


if __name__ == "__main__":
    write_text(PAGE, page(world_data()))
