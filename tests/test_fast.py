"""Packed copies against the plain networks, and products by oneDNN against float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
from networks import randomise
from torch import nn
from worlds import generator, tiny_gpt_neo

from distill.lora import add_lora, merge_lora
from eval.scorers.encoder import EncoderConfig
from eval.scorers.similarity import SentenceEncoder
from eval.scorers.toxicity import ToxicityClassifier
from tinystories import Conditional, products
from tinystories.fast import ROWS, pack
from tinystories.gpt_neo import LinearGELU
from tinystories.products import SMALLEST, linear, suits_onednn
from twist.embedding import EmbeddingTwist
from twist.mlp import TwistMLP

needs_onednn = pytest.mark.skipif(not products.HAS_ONEDNN, reason="this PyTorch has no oneDNN")


@pytest.fixture
def all_by_onednn(monkeypatch):
    """Products go to oneDNN however small they are; those of other types stay with PyTorch."""
    monkeypatch.setattr(products, "SMALLEST", 1)


def assert_near(actual: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-6) -> None:
    """Equal up to `tolerance` of the largest number."""
    assert actual.shape == wanted.shape
    assert (actual.double() - wanted.double()).abs().max() <= tolerance * wanted.abs().max()


# packed networks


def encoder(kind: type[nn.Module]) -> nn.Module:
    """A random classifier or sentence encoder."""
    return randomise(kind(EncoderConfig(61, 24, 2, 4, 40, 30, 1, 1e-5, 1)), seed=3)


def embedding_twist() -> EmbeddingTwist:
    """A random twist tied to random embeddings."""
    embeddings = torch.randn(11, 24, generator=generator(3))
    return randomise(EmbeddingTwist(16, embeddings, generator(0)), seed=4)


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
    "embedding twist": (embedding_twist, (HIDDEN,)),
}


@pytest.fixture(params=NETWORKS)
def network(request, all_by_onednn):
    """A plain network, and what it reads."""
    make, inputs = NETWORKS[request.param]
    return make(), inputs


@torch.no_grad()
def test_a_packed_network_computes_what_the_plain_one_does(network):
    """In every type; bfloat16 within what its rounding costs."""
    plain, inputs = network
    assert_near(pack(plain)(*inputs), plain(*inputs), 1e-5)

    def output(dtype: torch.dtype) -> torch.Tensor:
        own = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
        return pack(copy.deepcopy(plain).to(dtype))(*own)

    exact = plain.double()(*[x.double() if x.is_floating_point() else x for x in inputs])
    torch.testing.assert_close(output(torch.float64), exact, rtol=1e-12, atol=1e-12)
    if isinstance(plain, EmbeddingTwist):
        return  # it stays in float32
    rounded = output(torch.bfloat16)
    assert rounded.dtype == torch.float32 and not torch.equal(rounded, exact.float())
    assert (rounded - exact).abs().mean() < 0.1 * exact.abs().mean()


@torch.no_grad()
def test_packing_leaves_the_plain_network_as_it_is(network):
    plain, inputs = network
    kinds = [type(module) for module in plain.modules()]
    tensors = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    pack(plain)(*inputs)
    assert [type(module) for module in plain.modules()] == kinds
    assert all(torch.equal(tensors[name], tensor) for name, tensor in plain.state_dict().items())


def test_a_packed_copy_has_no_gradient_and_is_packed_again_after_training(all_by_onednn):
    plain = tiny_gpt_neo(11, seed=6).requires_grad_()
    twist = randomise(TwistMLP(8, 16, 11, generator(0)), 4).requires_grad_()
    assert pack(twist).first.weight.data_ptr() == twist.first.weight.data_ptr(), "shared"
    for network, x in ((plain, IDS), (twist, HIDDEN[..., :8])):
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.1)
        for _ in range(2):
            before = pack(network)(x)
            assert not before.requires_grad
            optimizer.zero_grad()
            network(x).logsumexp(-1).sum().backward()
            optimizer.step()
            with torch.no_grad():
                after = network(x)
                assert (after - before).abs().max() > 0.1
                assert_near(pack(network)(x), after, 1e-5)


@pytest.mark.parametrize("window", [1, 3, 64])
@pytest.mark.parametrize("prompt", [1, 9])
@torch.no_grad()
def test_decoding_and_teacher_forcing(all_by_onednn, prompt, window):
    plain, rows, length = tiny_gpt_neo(11, seed=3, window_size=window), 7, 15
    source = generator(4)
    prompt = torch.randint(11, (prompt,), generator=source)
    models = [Conditional(model, prompt, length) for model in (pack(plain), plain)]
    decoders = [model.decoder(rows) for model in models]
    for t in range(length):
        tokens = torch.randint(11, (rows,), generator=source)
        ancestors = torch.randint(rows, (rows,), generator=source)
        for decoder in decoders:
            decoder.extend(tokens, ancestors if t % 4 else None)
        assert_near(decoders[0].hidden, decoders[1].hidden, 1e-5)
        part = slice(2, 5)
        found = [decoder.evaluate(models[0].head, part) for decoder in decoders]
        assert_near(*found, 1e-5)
    tokens = torch.randint(11, (4, length), generator=source)
    for ours, wanted in zip(*(model.log_probs(tokens) for model in models), strict=True):
        assert_near(ours, wanted, 1e-4)


@torch.no_grad()
def test_lora_is_packed_once_it_is_merged(all_by_onednn):
    plain, ids = tiny_gpt_neo(11, seed=5), IDS[:, :9]
    before = plain(ids)
    for parameter in add_lora(plain, generator(0)):
        nn.init.normal_(parameter, std=0.3, generator=generator(1))
    wanted = plain(ids)
    assert (wanted - before).abs().max() > 0.1
    merge_lora(plain)
    assert_near(pack(plain)(ids), wanted, 1e-5)


@torch.no_grad()
def test_queries_keys_and_values_of_one_product_are_those_of_three(all_by_onednn):
    plain = tiny_gpt_neo(11, hidden_size=24).h[0].attn
    x = HIDDEN[:, :1]
    layers = plain.q_proj, plain.k_proj, plain.v_proj
    for output, layer in zip(pack(plain).project(x), layers, strict=True):
        assert_near(output, F.linear(x.double(), layer.weight.double()), 1e-5)


@needs_onednn
@pytest.mark.parametrize("rows", [1, 150, ROWS, ROWS + 1, 20 * ROWS])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@torch.no_grad()
def test_a_packed_weight_serves_any_number_of_rows(rows, approximate):
    x, weight, bias = operands(rows)
    plain = LinearGELU(96, 160, approximate)
    plain.load_state_dict({"weight": weight, "bias": bias})
    wanted = F.linear(x.double(), weight.double(), bias.double())
    wanted = F.gelu(wanted, approximate=approximate)
    for layer in (plain, pack(plain)):
        assert_near(layer(x), wanted)


# products


def operands(*rows: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """x [*rows, 96], weight [160, 96], bias [160], of size 1."""
    source = generator(0)
    shapes = (*rows, 96), (160, 96), (160,)
    return [torch.randn(shape, generator=source).to(dtype) for shape in shapes]


@needs_onednn
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


@needs_onednn
@pytest.mark.parametrize("sizes", [(96, 160), (160, 96)])
def test_gradients_of_any_layout(sizes):
    """Whichever of the gradient and the input is narrower, and however both lie in memory."""
    source = generator(0)
    x = torch.randn(sizes[0], 300, generator=source).T.requires_grad_()
    weight = torch.randn(*sizes, generator=source).T.requires_grad_()
    factors = torch.randn(sizes[1], 300, generator=source).T
    pair = [
        torch.autograd.grad((product(x, weight) * factors).sum(), (x, weight))
        for product in (linear, lambda x, w: F.linear(x.double(), w.double()))
    ]
    for ours, theirs in zip(*pair, strict=True):
        assert_near(ours, theirs)
    same = x[:1].detach().expand(300, -1)
    assert_near(linear(same, weight), F.linear(same.double(), weight.double()))


@needs_onednn
def test_only_the_gradients_that_are_required_are_computed(monkeypatch):
    calls, onednn = [], products.onednn
    monkeypatch.setattr(products, "onednn", lambda *args: calls.append(args) or onednn(*args))
    for required in range(3):
        tensors = operands(200)
        tensors[required].requires_grad_()
        linear(*tensors).sum().backward()
        assert [i for i in range(3) if tensors[i].grad is not None] == [required]
    assert len(calls) == 5, "three forward, one each for x and weight"


def test_networks_train_through_these_products(monkeypatch):
    """The gradients of every parameter of a plain network are those of PyTorch's own products."""
    plain = tiny_gpt_neo(11, seed=2).requires_grad_()
    parameters, gradients = list(plain.parameters()), []
    for smallest in (1, 2**40):
        monkeypatch.setattr(products, "SMALLEST", smallest)
        log_p = Conditional(plain, torch.tensor([4, 2, 7]), 6).log_probs(IDS[:, :6])[0]
        gradients.append(torch.autograd.grad(log_p.sum(), parameters))
    for ours, theirs in zip(*gradients, strict=True):
        assert_near(ours, theirs, 1e-4)


@needs_onednn
@torch.no_grad()
def test_products_in_bfloat16():
    x, weight, bias = operands(200, dtype=torch.bfloat16)
    output = linear(x, weight, bias)
    assert output.dtype == torch.bfloat16
    assert_near(output, F.linear(x.double(), weight.double(), bias.double()), tolerance=0.01)


@needs_onednn
def test_small_products_and_other_types_stay_with_pytorch():
    x, weight, _ = operands(SMALLEST // (96 * 160))
    assert not suits_onednn(x, weight)
    x, weight, _ = operands(500)
    assert suits_onednn(x, weight) and not suits_onednn(x.double(), weight.double())
    assert not suits_onednn(x, weight.double())
    assert not suits_onednn(x.to("meta"), weight.to("meta"))
    with torch.autocast("cpu"):
        assert not suits_onednn(x, weight)
