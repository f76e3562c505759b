"""Self-distilled twisted SMC in one file: Algorithm 1 of arXiv:2507.02315 in an enumerable world.

A language model p, whose tokens are the letters a to d, writes words of eight. We want its
palindromes, which are rare:

    sigma(s) = p(s) phi(s) / Z_sigma,    log phi(s) = -BETA * (mirrored pairs of s that differ)

Only its second half shows whether a word is a palindrome, so a sampler must look ahead: that is the
job of the twist psi. Ours sees only the position and the letter before, not the opposite one. At
first few words have a large phi, so it learns little. The words that twisted SMC finds teach the
next language model, from which the next twist learns more:

    psi^(0) <- CTL on p^(0)                                                   line 1 of Algorithm 1
    for m = 1..M:   p^(m)   <- distil words of TSMC(p^(m-1), psi^(m-1))       line 3
                    psi^(m) <- CTL on p^(m), against the same sigma           line 4

This is the loop of `python main.py`, which resamples at the end alone by default; this file, as the
paper, at every step.

V letters (at most 26), T steps, K particles, R runs. Prefixes s_{1:t} are numbered: 0 is the empty
one, and prefix n followed by letter v is n V + 1 + v: a to d are 1 to 4, aa is 5, ab 6, ba 9, dd
20. N prefixes can still grow; S = 1 + N V counts all, and the last V^T are the whole words.

    logits     [N, V]    a language model: one row for each prefix that can grow
    log_p      [S]       log p(s_t | s_{1:t-1}), and log_q alike; 0 for the empty prefix
    log_psi    [S]       log psi(s_{1:t}); 0 for the empty prefix
    log_phi    [V^T]     the potential of the whole words

`python docs/tiny.py` takes a few seconds; a seed may follow, which changes p, too. In the table
KL(sigma||q) falls with every generation; the next column estimates it from 1000 exact samples. From
first to last log Z-hat rises and spreads less over the runs, and more words of a batch count in
twist learning (ESS). log Z-hat ends a little low, by Jensen's inequality and as it misses words
that q hardly ever writes, which the exact KL counts. "log mean" is the log of the mean of Z-hat
over the runs; this mean is unbiased, with an error of a tenth or two. Last comes sigma itself, by
enumeration.
"""

import itertools
import math
import sys
from string import ascii_lowercase

try:
    import torch
except ImportError:
    print("docs/tiny.py: PyTorch is missing; run `pip install torch`", file=sys.stderr)
    sys.exit(2)

V, T, BETA = 4, 8, 5.0
COUNTS = [V**t for t in range(T + 1)]  # prefixes of each length
N = sum(COUNTS[:-1])
GENERATIONS, PARTICLES, RUNS = 3, 100, 200
TWIST_STEPS, TWIST_RATE, BATCH, MODEL_STEPS, MODEL_RATE = 100, 0.1, 100, 100, 2.0


def children(values):
    """[S] -> [N, V]: row n holds the entries of prefix n's V continuations."""
    return values[1:].view(N, V)


def by_prefix(table):
    """[N, V] -> [S]: the way back, with 0 for the empty prefix."""
    return torch.cat([table.new_zeros(1), table.flatten()])


def language_model(logits):
    """The factors of eq. 1: log p(s_t | s_{1:t-1}) [S] from logits [N, V]."""
    return by_prefix(logits.log_softmax(-1))


def joint(log_factors):
    """eq. 1: log p(s_{1:t}) [S], the sum of its factors [S] along every prefix."""
    sums = [log_factors[:1]]  # T + 1 of [V^t]
    for factors in log_factors.split(COUNTS)[1:]:
        sums.append((sums[-1][:, None] + factors.view(-1, V)).flatten())
    return torch.cat(sums)


def enumerate_target(log_p, log_phi):
    """eq. 2 and eq. 3: log sigma(s_{1:t}) [S] and log Z_sigma, sums of p phi over all words."""
    sums = [joint(log_p)[N:] + log_phi]  # [V^T], then shorter and shorter prefixes down to [1]
    for _ in range(T):
        sums.insert(0, sums[0].view(-1, V).logsumexp(-1))
    return torch.cat(sums) - sums[0], sums[0].item()


def intermediate_targets(log_p, log_psi):
    """eq. 4: log p(s_{1:t}) psi(s_{1:t}) [S], log pi_t up to log Z_t; eq. 5 has it at T, too."""
    return joint(log_p) + log_psi


def proposal(log_p, log_psi):
    """q_t(s_t) = p(s_t | s_{1:t-1}) psi(s_{1:t}) / N_t(s_{1:t-1}): log q_t [S], log N_t [N]."""
    tilted = children(log_p + log_psi)  # [N, V]
    log_normaliser = tilted.logsumexp(-1)  # [N]
    return by_prefix(tilted - log_normaliser[:, None]), log_normaliser


def extend(prefixes, log_q, generator):
    """Prefixes [...] grow by a letter s_t ~ q_t each: the largest of logits + Gumbel noise."""
    logits = children(log_q)[prefixes]  # [..., V]
    gumbel = -torch.empty_like(logits).exponential_(generator=generator).log()
    return prefixes * V + 1 + (logits + gumbel).argmax(-1)


def tsmc(log_p, log_psi, log_phi, runs, particles, generator):
    """Twisted SMC: words [R, K] of equal weight, log Z-hat [R]; E[Z-hat] = Z_sigma for any psi."""
    log_q, log_normaliser = proposal(log_p, log_psi)
    prefixes = torch.zeros(runs, particles, dtype=torch.long)  # that of each particle
    log_z = log_p.new_zeros(runs)
    for t in range(1, T + 1):
        # 1. extend
        parents, prefixes = prefixes, extend(prefixes, log_q, generator)  # [R, K]
        # 2. reweight
        if t < T:  # p psi / (q_t psi before), in which s_t cancels
            log_weights = log_normaliser[parents] - log_psi[parents]  # [R, K]
        else:
            # The paper prints a sum over s_T, which needs phi of every last letter. Here s_T has
            # been drawn with psi in place of phi, and the weight corrects it: p phi / (psi q).
            log_weights = (log_p - log_q)[prefixes] + log_phi[prefixes - N] - log_psi[parents]
        log_z = log_z + log_weights.logsumexp(-1) - math.log(particles)
        # 3. resample
        weights = log_weights.softmax(-1)  # [R, K]
        ancestors = torch.multinomial(weights, particles, replacement=True, generator=generator)
        prefixes = prefixes.gather(1, ancestors)
    return prefixes, log_z


def ctl_loss(log_sigma, log_p, log_psi):
    """eq. 5: the sum over t of KL(sigma(s_{1:t}) || pi_t(s_{1:t})), exactly; only for the table."""
    log_pi = intermediate_targets(log_p, log_psi)
    pairs = zip(log_sigma.split(COUNTS)[1:], log_pi.split(COUNTS)[1:], strict=True)
    return sum((log_s.exp() * (log_s - log_pi.log_softmax(0))).sum() for log_s, log_pi in pairs)


def ctl_gradient(log_p, log_psi, log_phi, batch_size, generator):
    """eq. 6: the negative gradient for log psi [S] from words of q, and the ESS of positives.

    psi enters eq. 5 by log Z_t - E_sigma[log psi], and the gradient of log Z_t, which is
    sum p grad psi / Z_t, is the mean of grad log psi under pi_t.
    """
    log_q, _ = proposal(log_p, log_psi)
    prefixes = torch.zeros(batch_size, 1, dtype=torch.long)
    for _ in range(T):  # without resampling: the weights below are those of plain draws from q
        prefixes = torch.cat([prefixes, extend(prefixes[:, -1:], log_q, generator)], 1)
    prefixes = prefixes[:, 1:]  # [K, T]
    log_ratio = (log_p - log_q)[prefixes].cumsum(1)  # [K, T] log p(s_{1:t}) / q(s_{1:t})
    # sigma / q of whole words, and for every t its own pi_t / q
    positive = (log_ratio[:, -1] + log_phi[prefixes[:, -1] - N]).softmax(0)  # [K]
    negative = (log_ratio + log_psi[prefixes]).softmax(0)  # [K, T]
    coefficients = positive[:, None] - negative  # [K, T]
    gradient = torch.zeros_like(log_psi).index_add(0, prefixes.flatten(), coefficients.flatten())
    ess = 1 / positive.square().sum().item()
    return gradient, ess


def learn_twist(log_p, log_phi, generator):
    """CTL: log psi(s_{1:t}) = theta[t, s_{t-1}, s_t] climbs eq. 6; log psi [S] and the mean ESS."""
    step = torch.arange(T).repeat_interleave(torch.tensor(COUNTS[:-1]))  # [N]
    # all that the twist sees: the step and the letter before
    context = step * V + (torch.arange(N) - 1) % V  # [N]
    theta, ess = log_p.new_zeros(T * V, V), 0.0
    for _ in range(TWIST_STEPS):
        log_psi = by_prefix(theta[context])  # [S]
        gradient, ess_of_batch = ctl_gradient(log_p, log_psi, log_phi, BATCH, generator)
        theta = theta.index_add(0, context, TWIST_RATE * children(gradient))
        ess += ess_of_batch / TWIST_STEPS
    return by_prefix(theta[context]), ess


def distil(logits, words):
    """eq. 7: from p^(m-1) uphill in the mean log likelihood of words [R, K]; logits [N, V]."""
    prefixes, share = words.flatten(), logits.new_zeros(1 + N * V)
    for _ in range(T):
        share += torch.bincount(prefixes, minlength=len(share))  # [S] words with this prefix
        prefixes = (prefixes - 1) // V  # one letter shorter
    share = children(share) / words.numel()  # [N, V]
    # Rows that few words pass through hardly move in MODEL_STEPS: the regularisation.
    for _ in range(MODEL_STEPS):
        logits = logits + MODEL_RATE * (share - share.sum(-1, keepdim=True) * logits.softmax(-1))
    return logits


def effective_potential(log_p_base, log_phi, log_p):
    """eq. 8: log phi^(m) = log p^(0) + log phi - log p^(m) [V^T], which keeps sigma as it is."""
    return joint(log_p_base)[N:] + log_phi - joint(log_p)[N:]


def self_distilled_tsmc(logits, log_phi, generator):
    """Algorithm 1; yields log p^(m), log psi^(m), the mean ESS, words and log Z-hat."""
    log_p_base, words = language_model(logits), None
    for m in range(GENERATIONS + 1):
        logits = distil(logits, words) if m > 0 else logits  # line 3
        log_p = language_model(logits)
        log_phi_m = effective_potential(log_p_base, log_phi, log_p)  # phi itself at m = 0
        log_psi, ess = learn_twist(log_p, log_phi_m, generator)  # lines 1 and 4
        words, log_z = tsmc(log_p, log_psi, log_phi_m, RUNS, PARTICLES, generator)
        yield log_p, log_psi, ess, words, log_z


def main(seed=0):
    """Algorithm 1 from a random p^(0), its estimates beside the exact values."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(N, V, dtype=torch.float64, generator=generator)
    letters = ascii_lowercase[:V]
    words = ["".join(word) for word in itertools.product(letters, repeat=T)]  # V^T
    differing = [sum(word[i] != word[-1 - i] for i in range(T // 2)) for word in words]  # V^T
    log_phi = -BETA * torch.tensor(differing, dtype=torch.float64)  # [V^T]
    log_sigma, log_z_sigma = enumerate_target(language_model(logits), log_phi)
    sigma = log_sigma[N:].exp()  # [V^T]
    draws = torch.multinomial(sigma, 1000, replacement=True, generator=generator)
    exact = N + draws  # exact samples of sigma
    heading = "    m  CTL loss  KL(sigma||q)  estimated  log Z-hat  spread    ESS  palindromes"
    print(f"{heading}  log mean  three words of one run")
    line = "{:>5}  {:8.2f}  {:12.2f}  {:9.2f}  {:9.2f}  {:6.2f}  {:5.1f}  {:11.0%}  {:8.2f}  {}"
    generations = self_distilled_tsmc(logits, log_phi, generator)
    for m, (log_p, log_psi, ess, samples, log_z) in enumerate(generations):
        loss = ctl_loss(log_sigma, log_p, log_psi)
        log_q, _ = proposal(log_p, log_psi)
        gap = log_sigma - joint(log_q)  # [S], for whole words log sigma - log q
        kl, estimated = (sigma * gap[N:]).sum(), gap[exact].mean()
        share = (log_phi[samples - N] == 0).double().mean()
        mean, spread, log_mean = log_z.mean(), log_z.std(), log_z.logsumexp(0) - math.log(RUNS)
        three = " ".join(words[n - N] for n in samples[0, :3])
        print(line.format(m, loss, kl, estimated, mean, spread, ess, share, log_mean, three))
    share, three = sigma[log_phi == 0].sum(), " ".join(words[n - N] for n in exact[:3])
    print(line.format("sigma", 0, 0, 0, log_z_sigma, 0, BATCH, share, log_z_sigma, three))


if __name__ == "__main__":
    if len(sys.argv) > 2 or not all(w.isdecimal() and len(w) < 19 for w in sys.argv[1:]):
        print("tiny.py: error: give one whole number below 10^18, the seed", file=sys.stderr)
        sys.exit(2)
    main(*map(int, sys.argv[1:]))
