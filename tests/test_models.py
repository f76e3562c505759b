"""GPT-Neo, networks of `transformers` and tables as p: against their own plain forward, with texts
that end and without; what is refused."""

import math

import pytest
import torch
from networks import LONGROPE, PROMPT, any_model, tiny, write
from safetensors.torch import load_file, save_file
from worlds import INF, generator, random_model, tiny_gpt_neo

from eval.options import POCKET
from tinystories import decoder as decoders
from tinystories.any_model import AnyModel
from tinystories.gpt_neo import GPTNeoModel, KeyValueCache
from tinystories.load import load_model
from tsmc.exact import TableModel

V, T = 3, 4
CLOSE = {"rtol": 1e-4, "atol": 1e-6}  # some networks compute norms in float32
pytestmark = pytest.mark.filterwarnings("error::FutureWarning")


class Changed(AnyModel):
    """p at a temperature of one half, without token 0."""

    def logits(self, hidden):
        return (2 * super().logits(hidden)).index_fill(-1, torch.tensor([0]), -INF)


def gpt_neo(kind: str, window: int, prompt: torch.Tensor, end=()) -> GPTNeoModel:
    layers = {"window_size": window, "attention_layers": (kind, "local")}
    return GPTNeoModel(tiny_gpt_neo(V, 3, **layers).double(), prompt, 9, end)


OPT = {"ffn_dim": 16, "word_embed_proj_dim": 4}
GEMMA = {"head_dim": 4, "final_logit_softcapping": 0.5, "sliding_window": 4}
LLAMA4 = {"head_dim": 4, "intermediate_size_mlp": 16, "num_local_experts": 1, "pad_token_id": 0}
MODELS = {  # what a network has that others have not
    "GPT-Neo, past its window": lambda: gpt_neo("global", 1, PROMPT[:1]),
    "GPT-Neo, long prompt": lambda: gpt_neo("local", 4, PROMPT.repeat(3)),
    "GPT-Neo, texts end": lambda: gpt_neo("global", 3, PROMPT, (2, 1)),
    "opt, narrower states": lambda: any_model("opt", **OPT),
    "gemma2, capped": lambda: any_model("gemma2", PROMPT.repeat(2), **GEMMA),
    "granite, divides": lambda: any_model("granite", logits_scaling=3.0),
    "llama, texts end": lambda: any_model("llama", length=8, end=(1,)),
    "llama4, a body by another name": lambda: any_model("llama4_text", **LLAMA4),
    "gpt2, changed logits": lambda: Changed(tiny("gpt2"), PROMPT, T),
    "a table": lambda: random_model(T),
    "a table, texts end": lambda: random_model(6, (2, 1)),
}


def plain_logits(model, ids: torch.Tensor) -> torch.Tensor:
    """Logits [N, V] of the next token after ids [N, P + t], by one forward of the network."""
    if isinstance(model, TableModel):
        number = torch.zeros(len(ids), dtype=torch.long)
        for column in ids[:, 1:].unbind(1):
            number = number * V + 1 + column
        return model.table[number]
    output = model.network(ids)
    logits = getattr(output, "logits", output)[:, -1]
    return 2 * logits + torch.tensor([-INF, 0, 0]) if isinstance(model, Changed) else logits


@pytest.mark.parametrize("share", [0.0, 0.8, 0.99])
@pytest.mark.parametrize("name", MODELS)
def test_every_step_and_gradient_is_that_of_a_plain_forward(name, share, monkeypatch):
    """However rows are reordered, and whether equal ones are computed once never, sometimes or
    always. Behind an end the first end follows for certain, from the state that the end had."""
    monkeypatch.setattr(decoders, "GROUP", 1)
    monkeypatch.setattr(decoders, "SHARING_PAYS", share)
    model, source, rows = MODELS[name](), generator(4), 7
    certain = torch.full((V,), -INF).double()
    certain[list(model.end[:1])] = 0.0
    decoder, ids = model.decoder(rows), model.prompt.repeat(rows, 1)
    start = ids.shape[1]  # P
    seen = []  # states that each row was drawn from
    for t in range(model.length):
        is_finished = torch.isin(ids[:, start:], torch.tensor(model.end)).any(1)  # [N]
        wanted = plain_logits(model, ids).where(~is_finished[:, None], certain)
        found = model.head(decoder.hidden)
        torch.testing.assert_close(found, wanted.detach(), **CLOSE)
        if share == 0.99 and t > 0:
            assert len(decoder.shared) == len(ids.unique(dim=0))
        tokens = torch.randint(1, V, (rows,), generator=source)
        if model.end and t < 2:
            tokens[2:] = 0  # some texts go on
        ancestors = torch.randint(rows, (rows,), generator=source) if t % 4 == 1 else None
        order = torch.arange(rows) if ancestors is None else ancestors
        tokens = tokens.where(~is_finished[order], (model.end or (0,))[0])
        seen = [state[order] for state in [*seen, decoder.hidden]]
        ids = torch.cat([ids[order], tokens[:, None]], 1)
        if t + 1 < model.length:
            decoder.append(tokens, ancestors)
    tokens = ids[:, start:]
    hidden, log_p = model.hidden(tokens), model.log_probs(tokens)
    torch.testing.assert_close(hidden, torch.stack(seen, 1), **CLOSE)
    assert hidden.shape[-1] == model.width
    is_end = torch.isin(tokens, torch.tensor(model.end))
    is_behind = is_end.cumsum(1) > is_end.long()  # [N, T]
    assert bool(model.end) == bool(is_behind.any()) and not is_behind.all(1).any()
    assert (log_p[is_behind] == 0).all()
    steps = [plain_logits(model, ids[:, :t]) for t in range(start, ids.shape[1])]
    chosen = torch.stack(steps, 1).log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    chosen = chosen.where(~is_behind, 0.0)
    torch.testing.assert_close(log_p, chosen, **CLOSE)
    if not isinstance(model, TableModel):
        factors = torch.randn(log_p.shape, generator=source)
        parameters = list(model.network.parameters())
        ours, theirs = (
            torch.autograd.grad((x * factors).sum(), parameters, allow_unused=True)
            for x in (log_p, chosen)
        )
        torch.testing.assert_close(ours, theirs, **CLOSE)


OTHER = "with a cache the network has other logits than its own forward"
REFUSED = [  # a kind of network, sizes, a length at which it is refused, why, one where it is not
    ("bert", {}, 4, OTHER, 0),
    ("mamba", {}, 4, OTHER, 1),
    ("phi3", LONGROPE, 9, OTHER, 5),
    ("gpt2", {}, 14, "the prompt has 3 tokens and the continuation 14.*the model has 16", 13),
]


@pytest.mark.parametrize(("kind", "sizes", "length", "fault", "shorter"), REFUSED)
def test_a_network_that_does_not_fit_at_this_length_is_refused(kind, sizes, length, fault, shorter):
    network = tiny(kind, **sizes)
    if shorter:
        AnyModel(network, PROMPT, shorter)
    with pytest.raises(ValueError, match=fault):
        AnyModel(network, PROMPT, length)
    network.get_output_embeddings().weight.data[1] = math.nan
    with pytest.raises(ValueError, match=OTHER):
        AnyModel(network, PROMPT, T)


@torch.no_grad()
def test_attention_is_computed_in_float32_and_unscaled_whatever_the_type():
    network = tiny_gpt_neo(11, hidden_size=32, num_heads=4).to(torch.bfloat16)
    attention = network.transformer.h[0].attn["attention"]
    x = torch.randn(3, 9, 32, generator=generator(0)).to(torch.bfloat16)
    layers = attention.q_proj, attention.k_proj, attention.v_proj
    q, k, v = (layer(x).double().unflatten(-1, (4, -1)).transpose(1, 2) for layer in layers)
    scores = (q @ k.mT).masked_fill(torch.ones(9, 9).triu(1).bool(), -INF)
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
    wanted = attention.out_proj(mixed.to(torch.bfloat16))
    assert (attention(x, KeyValueCache()) - wanted).abs().mean() < 1e-4 * wanted.abs().mean()


@torch.no_grad()
def test_any_causal_language_model_is_loaded_and_only_with_its_weights(tmp_path):
    """Its network has room for more tokens than the tokenizer knows."""
    network = tiny("llama", vocab_size=4100)
    write(tmp_path, "lm", network)
    settings = (str(tmp_path), "Once upon", T)
    model, tokenizer = load_model(*settings, ("<|endoftext|>", "."))
    assert model.prompt.tolist() == tokenizer.encode("Once upon").ids
    assert model.end == (0, tokenizer.token_to_id(".")) and model.vocab_size == 4096
    tokens = torch.tensor([[5, 4095, 7, 8]])
    ids = torch.cat([model.prompt[None], tokens], 1)
    logits = network(ids).logits[:, len(model.prompt) - 1 : -1, :4096]
    wanted = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    torch.testing.assert_close(model.log_probs(tokens), wanted.float())
    path, norm = tmp_path / "model.safetensors", "model.norm.weight"
    weights = load_file(path)
    others = {name: tensor for name, tensor in weights.items() if name != norm}
    damaged = [(others, f"missing keys: {norm}"), (weights | {"x": torch.ones(9)}, "unexpected")]
    damaged += [(others | {norm: torch.ones(9)}, f"mismatched keys:.*{norm}")]
    for content, fault in damaged:
        save_file(content, path, {"format": "pt"})
        with pytest.raises(ValueError, match=fault):
            load_model(*settings)


def test_prompts_and_ends_that_do_not_fit_are_refused(tmp_path):
    path = str(POCKET / "lm")
    model, tokenizer = load_model(path, "there was a\n", T, ("Once",))
    assert type(model) is GPTNeoModel and model.end == (tokenizer.token_to_id("Once"),)
    for prompt, length, end, fault in (
        ("there was a ", T, (), "the prompt ends in a space, after which p knows no word"),
        ("there was a", T, ("END",), "--end END: is not one of the tokenizer's tokens"),
        ("", T, (), "the prompt has 0 tokens"),
        ("there was a", 10**4, (), "the continuation 10000; the prompt needs at least one"),
    ):
        with pytest.raises(ValueError, match=fault):
            load_model(path, prompt, length, end)
