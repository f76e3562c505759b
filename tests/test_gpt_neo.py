"""GPT-Neo: its cache, its decoder and its attention; test_layouts.py compares its logits."""

import pytest
import torch
from worlds import generator, tiny_gpt_neo

from tinystories import Conditional
from tinystories import decoder as decoder_module


@pytest.mark.parametrize(("prompt", "kind"), [(1, "global"), (9, "local")])
@pytest.mark.parametrize("share", [0.0, 0.8, 0.99])
@torch.no_grad()
def test_cached_equals_uncached_after_any_reordering(prompt, kind, share, monkeypatch):
    """Whether equal rows are computed once never, sometimes or always; many rows are equal."""
    monkeypatch.setattr(decoder_module, "GROUP", 1)
    monkeypatch.setattr(decoder_module, "SHARING_PAYS", share)
    network = tiny_gpt_neo(11, seed=3, window_size=4, attention_layers=(kind, "local")).double()
    source, rows, length = generator(4), 7, 15
    model = Conditional(network, torch.randint(11, (prompt,), generator=source), length)
    decoder, tokens = model.decoder(rows), torch.empty(rows, 0, dtype=torch.long)
    for t in range(length):
        step = torch.randint(2, (rows,), generator=source)
        tokens = torch.cat([tokens, step[:, None]], 1)
        _, logits, hidden = model.log_probs(tokens)
        close = {"rtol": 1e-10, "atol": 1e-10}
        torch.testing.assert_close(decoder.hidden, hidden[:, -1], **close)
        for part in (slice(None), slice(2, 5), slice(6, 7)):
            states, place = decoder.distinct(part)
            torch.testing.assert_close(model.head(states)[place], logits[part, -1], **close)
        ancestors = torch.randint(rows, (rows,), generator=source) if t % 4 else None
        tokens = tokens if ancestors is None else tokens[ancestors]
        if t + 1 < length:
            decoder.append(tokens[:, -1], ancestors)
            states = {0.0: rows, 0.99: len(tokens.unique(dim=0))}
            assert len(decoder.states) == states.get(share, len(decoder.states))


@pytest.mark.parametrize(("window", "prompt", "length"), [(1, 1, 6), (3, 9, 6), (64, 9, 1)])
def test_the_shared_prompt_changes_neither_probabilities_nor_gradients(window, prompt, length):
    network, source = tiny_gpt_neo(11, seed=2, window_size=window).double(), generator(0)
    prompt = torch.randint(11, (prompt,), generator=source)
    tokens = torch.randint(11, (4, length), generator=source)
    logits = network(torch.cat([prompt.expand(4, -1), tokens], 1))[:, len(prompt) - 1 : -1]
    wanted = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    log_p, shared_logits, _ = Conditional(network, prompt, length).log_probs(tokens)
    torch.testing.assert_close(log_p, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(shared_logits, logits, rtol=1e-10, atol=1e-10)
    factors = torch.randn(4, length, generator=source)
    pair = ((x * factors).sum() for x in (log_p, wanted))
    ours, theirs = (torch.autograd.grad(x, list(network.parameters())) for x in pair)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@torch.no_grad()
def test_attention_is_computed_in_float32_and_unscaled_whatever_the_type():
    network = tiny_gpt_neo(11, hidden_size=32, num_heads=4).to(torch.bfloat16)
    attention = network.transformer.h[0].attn["attention"]
    x = torch.randn(3, 9, 32, generator=generator(0)).to(torch.bfloat16)
    layers = attention.q_proj, attention.k_proj, attention.v_proj
    q, k, v = (layer(x).double().unflatten(-1, (4, -1)).transpose(1, 2) for layer in layers)
    scores = (q @ k.mT).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
    wanted = attention.out_proj(mixed.to(torch.bfloat16))
    assert (attention(x, None) - wanted).abs().mean() < 1e-4 * wanted.abs().mean()
