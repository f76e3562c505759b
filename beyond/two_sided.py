"""How far is a draw of TSMC from the target? log Z between two means, under any rule of resampling.

    E[log Z-hat] <= log Z <= E[log Z-hat of runs that hold a sample of sigma]

A run that holds s ~ sigma is TSMC of K particles one of which is s throughout: it takes the tokens
of s, and where the run resamples it is its own ancestor, while the others draw from all weights.
The law of such a run over that of a plain run and a draw from it by weight is Z-hat / Z, so

    KL(sigma||law of a draw) <= E[log Z-hat of runs that hold a sample] - log Z

(Zhao et al. 2024, section 5; resampling is multinomial.) N = R K rows, R runs, K particles.
"""

import torch
from torch import Generator, Tensor

from eval.sample import TrainedJob
from tinystories.decoder import Decoder
from tsmc.draws import effective_sample_size, log_mean_exp, multinomial, normalise, uniforms
from tsmc.proposal import Twist, extend
from tsmc.sampler import Rule, tsmc
from tsmc.sigma import Sigma

THRESHOLDS = {"every step": 1.0, "end alone": 0.0}
RUNS = 40  # of each kind


@torch.no_grad()
def holding_log_z(
    sigma: Sigma,
    twist: Twist | None,
    held: Tensor,
    particles: int,
    generator: Generator,
    rule: Rule,
) -> Tensor:
    """log Z-hat [R] of runs of K = particles, the first of which is held [R, T]; no prefix part."""
    model = sigma.model
    runs, length = held.shape
    start = particles * torch.arange(runs, device=held.device)  # [R] rows of the held texts
    decoder = Decoder(model, runs * particles)
    tokens = held.new_empty(runs * particles, 0)  # [N, t]
    log_p = log_psi = model.head(decoder.hidden[:1]).new_zeros(runs * particles)  # [N]
    log_weights, log_z = log_p.view(runs, particles), log_p.new_zeros(runs)
    for t in range(length):
        step = extend(model, decoder, twist, uniforms(runs * particles, 1, generator))
        hidden, token = decoder.hidden[start], held[:, t, None]  # [R, D], [R, 1]
        step.tokens[start] = held[:, t]
        step.log_p[start] = model.head(hidden).log_softmax(-1).gather(1, token)[:, 0]
        if twist is not None:
            step.log_psi[start] = twist(hidden).gather(1, token)[:, 0]
        step.log_q[start] = (step.log_p + step.log_psi - step.log_normaliser)[start]
        tokens = torch.cat([tokens, step.tokens[:, None]], 1)  # [N, t]
        log_p = log_p + step.log_p
        log_w = step.log_normaliser - log_psi  # [N]
        if t == length - 1:
            log_phi = sigma.log_potential(tokens, log_p)
            log_w = step.log_p + log_phi - step.log_q - log_psi
        log_psi = step.log_psi
        log_weights = log_weights + log_w.view(runs, particles)  # [R, K]
        is_due = effective_sample_size(log_weights) < rule.ess_threshold * particles  # [R]
        is_due |= t == length - 1 or rule.ess_threshold == 1
        log_z = torch.where(is_due, log_z + log_mean_exp(log_weights), log_z)
        ancestors = rule.resample(normalise(log_weights), generator)  # [R, K]
        ancestors[:, 0] = 0
        identity = torch.arange(particles, device=held.device)
        ancestors = torch.where(is_due[:, None], ancestors, identity)
        parents = (start[:, None] + ancestors).flatten()  # [N]
        tokens, log_p, log_psi = tokens[parents], log_p[parents], log_psi[parents]
        log_weights = torch.where(is_due[:, None], 0.0, log_weights)
        if t < length - 1:
            decoder.append(tokens[:, -1], parents)
    return log_z


def bound_draws(trained: TrainedJob, exact: Tensor, log_w: Tensor) -> dict[str, float]:
    """E[log Z-hat] by rule, and that of runs which hold some of the exact samples [N, T], whose
    log w = log p^(0) phi / q is log_w [N]."""
    options, pair, world = trained.options, trained.pair, trained.world
    generator = torch.Generator(exact.device).manual_seed(options.seed)
    sigma = Sigma(pair.model, world.base, world.potential)
    # In the order of log w at even distances, so that few of them have nearly the mean of all.
    start = torch.rand(1, generator=generator, device=exact.device)
    places = (start + torch.arange(RUNS, device=exact.device)) / RUNS * len(exact)  # [R]
    held = exact[log_w.argsort()[places.long()]]  # [R, T]
    size = options.eval_particles
    found = {}
    for name, threshold in THRESHOLDS.items():
        rule = Rule(multinomial, threshold)
        plain = tsmc(sigma, pair.twist, size, generator, RUNS, rule).log_z  # [R]
        holding = holding_log_z(sigma, pair.twist, held, size, generator, rule)  # [R]
        found[f"below, {name}"] = plain.mean().item()
        found[f"above, {name}"] = holding.mean().item()
    return found
