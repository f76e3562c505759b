"""Random networks of transformers in the three roles, written to disk with shipped tokenizers."""

import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from eval.options import POCKET
from eval.scorers import SentenceEncoder, ToxicityClassifier, load_scorer
from tinystories.any_model import AnyModel
from tinystories.load import gpt_neo_from_json, load_network

LIMIT = 40  # tokens that the scorers have room for
LOAD = {  # networks and tokenizers of a directory
    "lm": lambda path: load_network(path, gpt_neo_from_json),
    "toxicity": lambda path: load_scorer(ToxicityClassifier, str(path), "cpu"),
    "similarity": lambda path: load_scorer(SentenceEncoder, str(path), "cpu"),
}
AUTO = {
    "lm": transformers.AutoModelForCausalLM,
    "toxicity": transformers.AutoModelForSequenceClassification,
    "similarity": transformers.AutoModel,
}
BERT = {"num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40}
ROBERTA = {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "num_labels": 1}
SHAPES = {
    "lm": {"num_layers": 2, "num_heads": 3, "window_size": 4, "max_position_embeddings": LIMIT},
    "toxicity": BERT | ROBERTA | {"max_position_embeddings": LIMIT + 2},
    "similarity": BERT | {"max_position_embeddings": LIMIT},
}
SHAPES["lm"]["attention_types"] = [[["global", "local"], 1]]
KINDS = {"lm": "gpt_neo", "toxicity": "roberta", "similarity": "bert"}
PROMPT = torch.tensor([1, 0, 2])
TINY = {"vocab_size": 3, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"intermediate_size": 16, "num_key_value_heads": 1, "max_position_embeddings": 16}
TINY |= {"bos_token_id": 0, "eos_token_id": None}
# Rotary factors that change for all positions where more than 8 tokens are read at once.
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.0]}
LONGROPE |= {"long_factor": [3.0, 3.0], "original_max_position_embeddings": 8}
LONGROPE = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 8, "pad_token_id": 0}


def randomise(model: nn.Module, seed: int) -> nn.Module:
    """Weights of size 1 in every tensor: texts differ, and no tensor can be forgotten."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            parameter.data = name.endswith("weight") + 0.3 * noise  # 1 + noise in a LayerNorm
        else:
            is_table = "embeddings" in name or "wte" in name or "wpe" in name
            parameter.data = noise if is_table else noise / parameter.shape[1] ** 0.5
    return model.eval()


def oracle(role: str, **changes) -> transformers.PreTrainedModel:
    sizes = {"vocab_size": 5000, "hidden_size": 24} | SHAPES[role] | changes
    config = transformers.AutoConfig.for_model(KINDS[role], **sizes)
    return randomise(AUTO[role].from_config(config), seed=0)


def tiny(kind: str, **changes) -> nn.Module:
    """A random causal language model of V = 3 tokens, float64."""
    config = transformers.AutoConfig.for_model(kind, **(TINY | changes))
    network = randomise(transformers.AutoModelForCausalLM.from_config(config), 1).double()
    network.get_output_embeddings().weight.data *= 0.4  # no token is very rare
    return network


def any_model(kind: str, prompt=PROMPT, length=4, **changes) -> AnyModel:
    """A tiny network after a prompt; `end` and `vocab_size` are AnyModel's, the others sizes."""
    settings = {name: changes.pop(name) for name in ("end", "vocab_size") if name in changes}
    return AnyModel(tiny(kind, **changes), prompt, length, **settings)


def write(path: Path, role: str, network: nn.Module) -> None:
    """Save a network and the shipped tokenizer of its role."""
    network.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(POCKET / role / name, path)


def encoded(path: Path, texts: list[str], limit: int = LIMIT) -> dict[str, Tensor]:
    """Tokens and mask of padded texts, by the tokenizer of transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    options = {"padding": True, "truncation": True, "max_length": limit, "return_tensors": "pt"}
    return dict(tokenizer(texts, return_token_type_ids=False, **options))


@torch.no_grad()
def expected(role: str, network, inputs: dict[str, Tensor]) -> Tensor:
    """What a network of transformers makes of tokens: logits, or unit vectors."""
    output = network(**inputs)
    if role == "lm":
        return output.logits
    if role == "toxicity":
        return output.logits[:, 0]
    rows = zip(output.last_hidden_state, inputs["attention_mask"].bool(), strict=True)
    return F.normalize(torch.stack([row[kept].mean(0) for row, kept in rows]), dim=-1)


def assert_close(actual: Tensor, wanted: Tensor, tolerance: float = 2e-5) -> None:
    """Equal up to `tolerance` of the largest wanted value, which may be float64."""
    assert actual.shape == wanted.shape and actual.dtype == torch.float32
    assert (actual - wanted).abs().max() <= tolerance * wanted.abs().max()


@torch.no_grad()
def assert_same(role: str, path: Path, network, tokens: int = 24) -> None:
    """The loaded network gives what that of transformers gives."""
    model, _ = LOAD[role](path)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, model.config.vocab_size, (3, tokens), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    found = model(ids) if role == "lm" else model(*inputs.values())
    assert_close(found, expected(role, network, inputs))
