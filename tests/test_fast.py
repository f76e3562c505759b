"""Fast networks against plain ones, products by oneDNN against float64, and when a weight is packed and packed anew."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from test_similarity import randomise
from torch import nn
from worlds import generator, tiny_gpt_neo

from distill.lora import add_lora, merge_lora
from eval.scorers.encoder import EncoderConfig
from eval.scorers.similarity import SentenceEncoder
from eval.scorers.toxicity import ToxicityClassifier
from tinystories import Conditional, fast
from tinystories.fast import HAS_ONEDNN, PACKED, ROWS, SMALLEST, FastLinear, accelerate, linear, suits_onednn
from tinystories.gpt_neo import Attention, GPTNeo
from tinystories.layers import LinearGELU
from twist import TwistMLP

pytestmark = pytest.mark.skipif(not HAS_ONEDNN, reason="this PyTorch has no oneDNN")


@pytest.fixture(autouse=True)
def nothing_packed():
    """Every test starts with an empty table."""
    PACKED.clear()


@pytest.fixture
def all_by_onednn(monkeypatch):
    """Products go to oneDNN however small they are; those of other types stay."""
    monkeypatch.setattr(fast, "SMALLEST", 1)


def operands(*rows: int, dtype=torch.float32):
    """x [*rows, 96], weight [160, 96], bias [160], of size 1."""
    source = generator(0)
    shapes = (*rows, 96), (160, 96), (160,)
    return [torch.randn(shape, generator=source).to(dtype) for shape in shapes]


def assert_near(actual: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-6) -> None:
    """Equal up to `tolerance` of the largest number."""
    assert actual.shape == wanted.shape
    assert (actual.double() - wanted.double()).abs().max() <= tolerance * wanted.abs().max()


# networks


def small_encoder(kind: type[nn.Module]) -> nn.Module:
    """A random classifier or sentence encoder."""
    return randomise(kind(EncoderConfig(61, 24, 2, 4, 40, 30, 1, 1e-5, 1)), seed=3)


def small_twist() -> TwistMLP:
    """A random twist."""
    return randomise(TwistMLP(24, 16, 11, generator(0)), seed=4)


IDS = torch.randint(5, 11, (6, 20), generator=generator(1))
MASK = (torch.arange(20) < torch.tensor([20, 3, 7, 20, 11, 1])[:, None]).long()
HIDDEN = torch.randn(6, 20, 24, generator=generator(2))
NETWORKS = {
    "language model": (lambda: tiny_gpt_neo(11, seed=1, hidden_size=24, window_size=4), (IDS,)),
    "untied head": (lambda: tiny_gpt_neo(11, seed=1, hidden_size=24, tie_word_embeddings=False), (IDS,)),
    "classifier": (lambda: small_encoder(ToxicityClassifier), (IDS, MASK)),
    "sentence encoder": (lambda: small_encoder(SentenceEncoder), (IDS, MASK)),
    "twist": (small_twist, (HIDDEN,)),
}


@pytest.fixture(params=NETWORKS)
def network(request, all_by_onednn):
    """A plain network, and what it reads."""
    make, inputs = NETWORKS[request.param]
    return make(), inputs


def gradients(model: nn.Module, inputs: tuple, factors: torch.Tensor) -> list[torch.Tensor]:
    """The gradient of sum(output * factors) with respect to every parameter."""
    output = model.requires_grad_()(*inputs)
    return torch.autograd.grad((output * factors).sum(), list(model.parameters()), allow_unused=True)


def test_a_fast_network_computes_what_the_plain_one_does(network):
    plain, inputs = network
    quick = accelerate(copy.deepcopy(plain))
    with torch.no_grad():
        wanted = plain(*inputs)
        assert_near(quick(*inputs), wanted, 1e-5)
    factors = torch.randn(wanted.shape, generator=generator(3))
    assert_near(quick(*inputs), wanted, 1e-5)
    for ours, theirs in zip(gradients(quick, inputs, factors), gradients(plain, inputs, factors), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs.abs().max() > 1e-6:  # a key's bias moves no softmax
            assert_near(ours, theirs, 1e-4)


def test_only_classes_change(network):
    model, _ = network
    names, kinds = zip(*((name, type(module)) for name, module in model.named_modules()), strict=True)
    tensors = [(name, tensor.data_ptr()) for name, tensor in model.state_dict().items()]
    for _ in range(2):
        assert accelerate(model) is model
        assert tuple(name for name, _ in model.named_modules()) == names
        assert [(name, tensor.data_ptr()) for name, tensor in model.state_dict().items()] == tensors
        for module, kind in zip(model.modules(), kinds, strict=True):
            assert type(module) is fast.FAST.get(kind, kind) and isinstance(module, kind)
            assert type(module) not in (nn.Linear, LinearGELU, Attention, GPTNeo)


def test_a_copy_of_a_fast_network_is_fast_and_has_weights_of_its_own(network):
    plain, inputs = network
    original = accelerate(plain)
    with torch.no_grad():
        wanted = original(*inputs)
        packed = len(PACKED)
        student = copy.deepcopy(original)
        assert len(PACKED) == packed, "what is packed stays behind"
        assert [type(module) for module in student.modules()] == [type(module) for module in original.modules()]
        for parameter in student.parameters():
            parameter.mul_(1.1)
        assert not torch.allclose(student(*inputs), wanted, rtol=1e-2)
        assert torch.equal(original(*inputs), wanted)


def test_another_type(network):
    plain, inputs = network
    inputs = [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]
    with torch.no_grad():
        exact = plain.double()(*inputs)
        quick = accelerate(copy.deepcopy(plain))
        torch.testing.assert_close(quick(*inputs), exact, rtol=1e-12, atol=1e-12)
        assert_near(quick.float()(*(x.float() if x.is_floating_point() else x for x in inputs)), exact, 1e-4)
        rounded = quick.to(torch.bfloat16)(*(x.bfloat16() if x.is_floating_point() else x for x in inputs))
        assert rounded.dtype == torch.float32 and not torch.equal(rounded, exact.float())
        assert (rounded - exact).abs().mean() < 0.1 * exact.abs().mean()
        assert_near(quick.double()(*inputs), plain.bfloat16().double()(*inputs), 1e-12)


@pytest.mark.parametrize("window", [1, 3, 64])
@pytest.mark.parametrize("prompt", [1, 9])
@torch.no_grad()
def test_decoding_with_reordering_and_past_the_window(all_by_onednn, prompt, window):
    plain, rows, length = tiny_gpt_neo(11, seed=3, window_size=window), 7, 15
    quick, source = accelerate(copy.deepcopy(plain)), generator(4)
    prompt = torch.randint(11, (prompt,), generator=source)
    decoders = [Conditional(model, prompt, length).decoder(rows) for model in (quick, plain)]
    for t in range(length):
        tokens, ancestors = torch.randint(11, (rows,), generator=source), torch.randint(rows, (rows,), generator=source)
        for decoder in decoders:
            decoder.extend(tokens, ancestors if t % 4 else None)
        assert_near(decoders[0].logits, decoders[1].logits, 1e-5)
        assert_near(decoders[0].logits_of(slice(2, 5)), decoders[1].logits[2:5], 1e-5)
        assert_near(decoders[0].hidden, decoders[1].hidden, 1e-5)
    assert PACKED, "the products were of packed weights"


@pytest.mark.parametrize("window", [1, 3, 64])
@pytest.mark.parametrize("length", [1, 6])
def test_teacher_forcing_and_its_gradients(all_by_onednn, length, window):
    plain, source = tiny_gpt_neo(11, seed=2, window_size=window), generator(0)
    quick = accelerate(copy.deepcopy(plain))
    prompt, tokens = torch.tensor([4, 2, 7]), torch.randint(11, (4, length), generator=source)
    factors, results = torch.randn(4, length, generator=source), []
    for model in (quick, plain):
        log_p, logits, hidden = Conditional(model.requires_grad_(), prompt, length).log_probs(tokens)
        results.append([log_p, logits, hidden, *torch.autograd.grad((log_p * factors).sum(), list(model.parameters()))])
    for ours, theirs in zip(*results, strict=True):
        assert_near(ours, theirs, 1e-4)


def test_lora_and_its_merging(all_by_onednn):
    plain = tiny_gpt_neo(11, seed=5)
    quick, ids = accelerate(copy.deepcopy(plain)), IDS[:, :9]
    with torch.no_grad():
        before = quick(ids[:, :1])
    for model in (plain, quick):
        for parameter in add_lora(model, generator(0)):
            nn.init.normal_(parameter, std=0.3, generator=generator(1))
    with torch.no_grad():
        wanted = plain(ids[:, :1])
        assert (wanted - before).abs().max() > 0.1
        assert_near(quick(ids[:, :1]), wanted, 1e-5)
        merge_lora(quick)
        assert type(quick.h[0].attn.q_proj) is FastLinear
        assert_near(quick(ids[:, :1]), wanted, 1e-5)
    assert not any("base" in name for name in quick.state_dict())


def test_training_goes_on_after_sampling(all_by_onednn):
    """A student that is sampled between its updates: what was packed before an update is not used after it."""
    plain = tiny_gpt_neo(11, seed=6)
    student = accelerate(copy.deepcopy(plain)).requires_grad_()
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.1)
    for _ in range(3):
        with torch.no_grad():
            before = student(IDS[:, :1])
            assert_near(before, plain(IDS[:, :1]), 1e-5)
            assert PACKED
        optimizer.zero_grad()
        student(IDS).logsumexp(-1).sum().backward()
        optimizer.step()
        plain.load_state_dict(student.state_dict())
        with torch.no_grad():
            assert (student(IDS[:, :1]) - before).abs().max() > 0.1
    with torch.no_grad():
        assert_near(student(IDS[:, :1]), plain(IDS[:, :1]), 1e-5)


# products


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


def test_only_the_gradients_that_are_required_are_computed(monkeypatch):
    products, onednn = [], fast.onednn
    monkeypatch.setattr(fast, "onednn", lambda *operands: products.append(operands) or onednn(*operands))
    for required in ("x", "weight", "bias"):
        x, weight, bias = operands(200)
        {"x": x, "weight": weight, "bias": bias}[required].requires_grad_()
        linear(x, weight, bias).sum().backward()
        assert [tensor.grad is not None for tensor in (x, weight, bias)] == [
            required == n for n in ("x", "weight", "bias")
        ]
    assert len(products) == 5, "three forward, one each for x and weight"


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("rows", [1, 200, 300])
def test_gelu_is_the_same_with_and_without_gradients(rows, approximate):
    x, weight, bias = operands(rows)
    plain = LinearGELU(96, 160, approximate)
    plain.load_state_dict({"weight": weight, "bias": bias})
    wanted = F.gelu(F.linear(x.double(), weight.double(), bias.double()), approximate=approximate)
    for layer in (plain, accelerate(copy.deepcopy(plain))):
        assert_near(layer(x), wanted)
        with torch.no_grad():
            assert_near(layer(x), wanted)


@torch.no_grad()
def test_products_in_bfloat16():
    x, weight, bias = operands(200, dtype=torch.bfloat16)
    wanted, parameter = F.linear(x.double(), weight.double(), bias.double()), nn.Parameter(weight)
    for output in (linear(x, weight, bias), linear(x, parameter, bias)):
        assert output.dtype == torch.bfloat16
        assert_near(output, wanted, tolerance=0.01)
    assert parameter in PACKED


def test_small_products_and_other_types_stay_with_pytorch():
    x, weight, _ = operands(SMALLEST // (96 * 160))
    assert not suits_onednn(x, weight)
    x, weight, _ = operands(500)
    assert suits_onednn(x, weight) and not suits_onednn(x.double(), weight.double())
    assert not suits_onednn(x, weight.double()) and not suits_onednn(x.to("meta"), weight.to("meta"))
    with torch.autocast("cpu"):
        assert not suits_onednn(x, weight)


# packing


def fast_layer() -> FastLinear:
    """A layer of 96 inputs and 160 outputs."""
    _, weight, bias = operands(1)
    layer = nn.Linear(96, 160)
    layer.load_state_dict({"weight": weight, "bias": bias})
    return accelerate(layer)


def product_is_right(layer: nn.Linear, rows: int = 150, tolerance: float = 2e-6) -> bool:
    """Whether the layer computes the product with the weight that it has now."""
    x = operands(rows)[0]
    with torch.no_grad():
        wanted = F.linear(x.double(), layer.weight.double(), layer.bias.double())
        error = (layer(x.to(layer.weight.dtype)).double() - wanted).abs().max()
    return bool(error <= tolerance * wanted.abs().max())


@pytest.mark.parametrize("rows", [150, ROWS, ROWS + 1, 20 * ROWS])
def test_a_weight_is_packed_once_for_any_number_of_rows(rows):
    layer = fast_layer()
    assert product_is_right(layer)
    kept = PACKED[layer.weight]
    assert product_is_right(layer, rows) and PACKED[layer.weight] is kept


def test_what_is_not_packed():
    """Tensors of one call, products with gradients, and weights whose writes nobody counts."""
    x, weight, bias = operands(150)
    layer = fast_layer()
    layer(x)
    with torch.no_grad():
        linear(x, weight, bias)
        assert not PACKED
    with torch.inference_mode():
        uncounted = nn.Parameter(weight.clone())
        assert_near(linear(x, uncounted, bias), F.linear(x, weight, bias))
        assert uncounted not in PACKED


def test_what_is_packed_goes_with_its_weight_and_is_in_no_state():
    layer = fast_layer()
    assert product_is_right(layer) and len(PACKED) == 1
    assert list(layer.state_dict()) == ["weight", "bias"] and not vars(layer).keys() - vars(nn.Linear(1, 1)).keys()
    del layer
    gc.collect()
    assert not PACKED


def test_packing_under_inference_mode_serves_other_modes():
    layer, x = fast_layer(), operands(150)[0]
    with torch.inference_mode():
        layer(x)
    assert len(PACKED) == 1 and product_is_right(layer)
    layer(x).sum().backward()
    assert_near(layer.weight.grad, x.double().sum(0).expand(160, -1))


OPTIMIZERS = [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD]
WAYS = [{}, {"foreach": True}, {"fused": True}]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "".join(way) or "default")
@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: make.__name__)
def test_a_step_of_an_optimiser_packs_anew(make, way):
    layer, x = fast_layer(), operands(150)[0]
    optimizer = make(layer.parameters(), lr=0.1, **way)
    for _ in range(3):
        assert product_is_right(layer) and layer.weight in PACKED
        before = layer.weight.detach().clone()
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()
        assert (layer.weight - before).abs().max() > 1e-3
    assert product_is_right(layer)


def through_data(layer: nn.Linear) -> None:
    """New tensors twice: the second may lie where the first weight lay."""
    for _ in range(2):
        layer.weight.data = 3 * layer.weight.data


CHANGES = {
    "load_state_dict": lambda layer: layer.load_state_dict(nn.Linear(96, 160).state_dict()),
    "assigned": lambda layer: layer.load_state_dict(nn.Linear(96, 160).state_dict(), assign=True),
    "copy_": lambda layer: layer.weight.copy_(2 * layer.weight),
    "in place": lambda layer: layer.weight.mul_(2),
    "a part in place": lambda layer: layer.weight[3].fill_(5.0),
    "of the detached": lambda layer: layer.weight.detach().mul_(2),
    "initialised": lambda layer: nn.init.normal_(layer.weight, generator=generator(5)),
    "new data": through_data,
    "other layout": lambda layer: setattr(layer.weight, "data", layer.weight.data.flip(1).T.contiguous().T),
    "transposed": lambda layer: setattr(layer.weight, "data", layer.weight.data.view(96, 160).T),
    "new parameter": lambda layer: setattr(layer, "weight", nn.Parameter(2 * layer.weight)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_the_weight_packs_anew(change):
    layer = fast_layer()
    assert product_is_right(layer) and layer.weight in PACKED
    before = layer(operands(150)[0]).detach()
    with torch.no_grad():
        change(layer)
    assert product_is_right(layer)
    assert not torch.allclose(layer(operands(150)[0]), before, rtol=0.01), "the change was one"


def test_a_change_of_type_packs_anew():
    layer = fast_layer()
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 0.02), (torch.float64, 1e-12)):
        assert product_is_right(layer.to(dtype), tolerance=tolerance)


def test_what_writes_through_data_do_not_tell():
    """The one limit, which `packed` states; clearing the table is the remedy that it gives."""
    layer = fast_layer()
    assert product_is_right(layer)
    layer.weight.data.mul_(2)
    assert not product_is_right(layer)
    PACKED.clear()
    assert product_is_right(layer)


@torch.no_grad()
@pytest.mark.parametrize("changed", ["q_proj", "k_proj", "v_proj"])
def test_the_joint_product_of_queries_keys_and_values(all_by_onednn, changed):
    attention = accelerate(tiny_gpt_neo(11, hidden_size=24)).h[0].attn
    x = torch.randn(6, 1, 24, generator=generator(0))
    layers = attention.q_proj, attention.k_proj, attention.v_proj
    for _ in range(2):
        for output, layer in zip(attention.project(x), layers, strict=True):
            assert_near(output, F.linear(x.double(), layer.weight.double()), 1e-5)
        assert len(PACKED) == 1, "one matrix for the three"
        with torch.enable_grad():
            assert all(output.requires_grad for output in attention.project(x))
        for _ in range(2):
            getattr(attention, changed).weight.data = 3 * getattr(attention, changed).weight.data
    setattr(attention, changed, nn.Sequential(nn.Linear(24, 7), nn.Linear(7, 24)))
    layers = attention.q_proj, attention.k_proj, attention.v_proj
    for output, layer in zip(attention.project(x), layers, strict=True):
        assert_near(output, layer(x), 1e-5)
