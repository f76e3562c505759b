"""Packed copies against the plain networks, and products by oneDNN against float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
from networks import assert_close, randomise
from torch import nn
from worlds import generator, tiny_gpt_neo

from eval.scorers.encoder import EncoderConfig
from eval.scorers.similarity import SentenceEncoder
from eval.scorers.toxicity import ToxicityClassifier
from tinystories import products
from tinystories.fast import pack
from tinystories.products import linear, suits_onednn
from twist.adapter import Adapter
from twist.mlp import TwistMLP

needs_onednn = pytest.mark.skipif(not products.HAS_ONEDNN, reason="this PyTorch has no oneDNN")


def encoder(kind: type[nn.Module]) -> nn.Module:
    return randomise(kind(EncoderConfig(61, 24, 2, 4, 40, 30, 1, 1e-5, 1)), seed=3)


def adapter(scores: torch.Tensor | None) -> Adapter:
    embeddings = torch.randn(11, 24, generator=generator(3))
    made = Adapter(embeddings, scores, 16, generator(0))
    randomise(made.shift, seed=4)
    return made


IDS = torch.randint(5, 11, (6, 20), generator=generator(1))
MASK = (torch.arange(20) < torch.tensor([20, 3, 7, 20, 11, 1])[:, None]).long()
HIDDEN = torch.randn(6, 20, 24, generator=generator(2))
LM = {"seed": 1, "hidden_size": 24, "window_size": 4}
NETWORKS = {
    "language model": (lambda: tiny_gpt_neo(11, **LM), (IDS,)),
    "untied head": (lambda: tiny_gpt_neo(11, tie_word_embeddings=False, **LM), (IDS,)),
    "classifier": (lambda: encoder(ToxicityClassifier), (IDS, MASK)),
    "sentence encoder": (lambda: encoder(SentenceEncoder), (IDS, MASK)),
    "twist": (lambda: randomise(TwistMLP(24, 16, 11, generator(0)), 4), (HIDDEN,)),
    "adapter": (lambda: adapter(None), (HIDDEN,)),
    "adapter with scores": (lambda: adapter(torch.linspace(-1, 2, 11)), (HIDDEN,)),
}


@pytest.mark.parametrize(("make", "inputs"), NETWORKS.values(), ids=NETWORKS)
@torch.no_grad()
def test_a_packed_network_computes_what_the_plain_one_does(monkeypatch, make, inputs):
    """In every type, all products by oneDNN; bfloat16 within what its rounding costs."""
    monkeypatch.setattr(products, "SMALLEST", 1)
    plain = make()
    kinds = [type(module) for module in plain.modules()]
    assert_close(pack(plain)(*inputs), plain(*inputs), 1e-5)
    assert [type(module) for module in plain.modules()] == kinds, "the plain one stays as it is"

    def output(dtype: torch.dtype) -> torch.Tensor:
        own = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
        return pack(copy.deepcopy(plain).to(dtype))(*own)

    exact = plain.double()(*[x.double() if x.is_floating_point() else x for x in inputs])
    torch.testing.assert_close(output(torch.float64), exact, rtol=1e-12, atol=1e-12)
    if isinstance(plain, Adapter):
        return  # it stays in float32
    rounded = output(torch.bfloat16)
    assert rounded.dtype == torch.float32 and not torch.equal(rounded, exact.float())
    assert (rounded - exact).abs().mean() < 0.1 * exact.abs().mean()


LAYOUTS = {
    "plain": torch.clone,
    "transposed": lambda x: x.mT.contiguous().mT,
    "strided": lambda x: x.repeat_interleave(2, 0)[::2],
}


@needs_onednn
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("rows", [(150,), (5, 30), (1, 200, 1)])
@pytest.mark.parametrize("sizes", [(96, 160), (160, 96)])
def test_values_and_gradients(rows, sizes, with_bias, layout):
    """Whichever of the gradient and the input is narrower, and however both lie in memory."""
    source, (inputs, outputs) = generator(0), sizes
    shapes = (*rows, inputs), (outputs, inputs), (outputs,)
    x, weight, bias = (torch.randn(shape, generator=source) for shape in shapes)
    assert suits_onednn(x, weight)
    place = LAYOUTS[layout]
    factors = place(torch.randn(*rows, sizes[1], generator=generator(1)))
    ours = [place(x), place(weight), bias] if with_bias else [place(x), place(weight)]
    exact = [tensor.double().requires_grad_() for tensor in ours]
    ours = [tensor.requires_grad_() for tensor in ours]
    outputs = linear(*ours), F.linear(*exact)
    for output in outputs:
        (output * factors.to(output.dtype)).sum().backward()
    assert_close(*outputs, 2e-6)
    for mine, theirs in zip(ours, exact, strict=True):
        assert_close(mine.grad, theirs.grad, 2e-6)
    with torch.no_grad():
        assert_close(linear(*ours), outputs[1], 2e-6)
