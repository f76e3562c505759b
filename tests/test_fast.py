"""Products by oneDNN against float64: values, gradients, layouts, and which products go there."""

import pytest
import torch
import torch.nn.functional as F
from worlds import generator

import tinystories.fast
from tinystories.fast import (
    FEW_ROWS,
    PACKED,
    SMALLEST,
    Linear,
    linear,
    linear_each,
    linear_gelu,
    steady_weights,
    suits_onednn,
)

pytestmark = pytest.mark.skipif(not tinystories.linear.HAS_ONEDNN, reason="this PyTorch has no oneDNN")


def operands(*rows: int, dtype=torch.float32):
    """x [*rows, 96], weight [160, 96], bias [160], of size 1."""
    source = generator(0)
    shapes = (*rows, 96), (160, 96), (160,)
    return [torch.randn(shape, generator=source).to(dtype) for shape in shapes]


def assert_near(actual: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-6) -> None:
    """Equal up to `tolerance` of the largest number."""
    assert actual.shape == wanted.shape
    assert (actual.double() - wanted.double()).abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("rows", [(150,), (5, 30), (1, 200, 1)])
def test_values_and_gradients(rows, with_bias):
    x, weight, bias = operands(*rows)
    tensors = [x, weight, bias] if with_bias else [x, weight]
    assert suits_onednn(x, weight)
    ours = [tensor.clone().requires_grad_() for tensor in tensors]
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    factors = torch.randn(*rows, 160, generator=generator(1))
    outputs = linear(*ours), F.linear(*exact)
    for output in outputs:
        (output * factors.to(output.dtype)).sum().backward()
    assert_near(outputs[0], outputs[1])
    for mine, theirs in zip(ours, exact, strict=True):
        assert_near(mine.grad, theirs.grad)
    with torch.no_grad():
        assert_near(linear(*ours), outputs[1])


def test_any_layout():
    x, weight, bias = operands(300)
    wanted = F.linear(x.double(), weight.double(), bias.double())
    for rows in (x.T.contiguous().T, x.repeat(1, 2)[:, :96], x.repeat_interleave(2, 0)[::2]):
        assert_near(linear(rows, weight.T.contiguous().T, bias), wanted)
    same = x[:1].expand(300, -1)
    assert_near(linear(same, weight, bias), wanted[:1].expand(300, -1))


def test_only_what_requires_gradients_gets_them():
    x, weight, bias = operands(200)
    linear(x, weight.requires_grad_(), bias).sum().backward()
    assert x.grad is None and bias.grad is None
    assert_near(weight.grad, x.double().sum(0).expand(160, -1))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("rows", [1, 200])
def test_gelu_is_the_same_with_and_without_gradients(rows, approximate):
    x, weight, bias = operands(rows)
    layer = Linear(96, 160)
    layer.load_state_dict({"weight": weight, "bias": bias})
    wanted = F.gelu(F.linear(x.double(), weight.double(), bias.double()), approximate=approximate)
    assert_near(linear_gelu(x, layer, approximate), wanted)
    with torch.no_grad():
        assert_near(linear_gelu(x, layer, approximate), wanted)


@torch.no_grad()
def test_bfloat16():
    x, weight, bias = operands(200, dtype=torch.bfloat16)
    output = linear(x, weight, bias)
    assert output.dtype == torch.bfloat16
    assert_near(output, F.linear(x.double(), weight.double(), bias.double()), tolerance=0.01)


@torch.no_grad()
@pytest.mark.parametrize("rows", [150, FEW_ROWS, FEW_ROWS + 1])
def test_steady_weights_change_no_product(rows):
    x, weight, bias = operands(rows)
    weight = torch.nn.Parameter(weight)
    layers = [Linear(96, 160, bias=False) for _ in range(3)]
    wide = Linear(96, 160)
    assert suits_onednn(x, weight)
    with steady_weights():
        for _ in range(2):
            assert_near(linear(x, weight, bias), F.linear(x.double(), weight.double(), bias.double()))
            wanted = F.gelu(F.linear(x.double(), wide.weight.double(), wide.bias.double()), approximate="tanh")
            assert_near(linear_gelu(x, wide, "tanh"), wanted)
            for output, layer in zip(linear_each(x, layers), layers, strict=True):
                assert_near(output, F.linear(x.double(), layer.weight.double()))


@torch.no_grad()
def test_weights_may_change_once_they_need_not_be_steady():
    x, weight, bias = operands(150)
    weight = torch.nn.Parameter(weight)
    layers = [Linear(96, 160, bias=False) for _ in range(2)]

    @steady_weights()
    def products() -> list[torch.Tensor]:
        with steady_weights():  # the outer promise holds on behind the inner one
            linear(x, weight, bias)
        return [linear(x, weight, bias), *linear_each(x, layers)]

    before = products()
    for tensor in (weight, *(layer.weight for layer in layers)):
        tensor.data.mul_(2)  # which PyTorch does not count as a change
    after = products()
    assert_near(after[0], F.linear(x.double(), weight.double(), bias.double()))
    for old, new in zip(before[1:], after[1:], strict=True):
        assert_near(new, 2 * old)


@torch.no_grad()
def test_tensors_of_one_call_are_not_kept():
    x, weight, bias = operands(150)
    with steady_weights():
        linear(x, weight, bias)
        assert not PACKED.get()
        linear_gelu(x, Linear(96, 160))
        assert len(PACKED.get()) == 1
    assert PACKED.get() is None


def test_layers_of_another_kind_or_with_gradients_stay_apart():
    x, _, _ = operands(150)
    other = torch.nn.Sequential(torch.nn.Linear(96, 8), torch.nn.Linear(8, 160))
    layers = [Linear(96, 160, bias=False), other, Linear(96, 160)]
    with steady_weights():
        for output, layer in zip(linear_each(x, layers), layers, strict=True):
            assert_near(output, layer(x))
        linear_each(x, layers[:1])[0].sum().backward()
        with torch.no_grad():
            for few in (layers[:2], layers[::2]):
                assert_near(linear_each(x, few)[1], few[1](x))
    assert_near(layers[0].weight.grad, x.double().sum(0).expand(160, -1))


def test_small_products_and_other_types_stay_with_pytorch():
    x, weight, _ = operands(SMALLEST // (96 * 160))
    assert not suits_onednn(x, weight)
    x, weight, _ = operands(500)
    assert suits_onednn(x, weight) and not suits_onednn(x.double(), weight.double())
    assert not suits_onednn(x.to("meta"), weight.to("meta"))
