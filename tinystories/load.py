"""GPT-Neo from and to a directory in the Hugging Face layout: its configuration, its weights, its tokenizer.

Names on disk carry the prefix `transformer.` or none and put the attention's projections under `attn.attention`; some
files also carry the causal mask as buffers (`attn.attention.bias`, `attn.attention.masked_bias`), which are no weights.
"""

from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tinystories.checkpoint import (
    fill,
    read_json,
    read_weights,
    without_prefix,
    without_values,
    write_json,
    write_tensors,
    write_text,
)
from tinystories.errors import InputError
from tinystories.fields import MOST_LAYERS, Fields
from tinystories.gpt_neo import GPTNeo, GPTNeoConfig
from tinystories.vocabulary import END_OF_TEXT, read_vocabulary

MASK_BUFFERS = ("attn.attention.bias", "attn.attention.masked_bias")
SIZES = ("vocab_size", "hidden_size", "num_heads", "max_position_embeddings")


def config_from_json(raw: dict, source: str) -> GPTNeoConfig:
    """The configuration that a `config.json` holds; InputError, naming `source`, where it is none of this network."""
    fields = Fields(raw, source, "gpt_neo")
    fields.word("activation_function", "gelu_new")
    sizes = {name: fields.whole(name) for name in SIZES}
    num_layers = fields.whole("num_layers", within=(1, MOST_LAYERS))
    try:  # one more than there should be tells that there are too many, however many are asked for
        groups = [(list(kinds), range(min(count, num_layers + 1))) for kinds, count in raw["attention_types"]]
    except (KeyError, TypeError, ValueError):
        groups = []
    layers = tuple(islice((kind for kinds, times in groups for _ in times for kind in kinds), num_layers + 1))
    if len(layers) != num_layers or not all(kind in ("global", "local") for kind in layers):
        fields.refuse(f"attention_types must name num_layers = {num_layers} global or local layers")
    if sizes["hidden_size"] % sizes["num_heads"]:
        fields.refuse("hidden_size is no multiple of num_heads")
    return GPTNeoConfig(
        **sizes,
        num_layers=num_layers,
        attention_layers=layers,
        window_size=fields.whole("window_size", 256),
        intermediate_size=fields.whole("intermediate_size", 4 * sizes["hidden_size"]),
        layer_norm_epsilon=fields.number("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=fields.truth("tie_word_embeddings", True),
    )


def config_to_json(config: GPTNeoConfig) -> dict:
    """The inverse of `config_from_json`, as `transformers` reads it."""
    fields = asdict(config)
    layers = fields.pop("attention_layers")
    return {
        "architectures": ["GPTNeoForCausalLM"],
        "model_type": "gpt_neo",
        "activation_function": "gelu_new",
        "attention_types": [[[kind], 1] for kind in layers],
        **dict.fromkeys(("attention_dropout", "embed_dropout", "resid_dropout"), 0.0),
        **fields,
    }


def names_in_memory(tensors: dict[str, Tensor], tied: bool, source: Path) -> dict[str, Tensor]:
    """Rename tensors as on disk to the names of `GPTNeo.state_dict`; a tied head's copy is dropped.

    InputError where config.json ties the head and the file holds another one.
    """
    renamed = {
        name.replace("attn.attention.", "attn."): tensor
        for name, tensor in without_prefix(tensors, "transformer.", source).items()
        if not name.endswith(MASK_BUFFERS)
    }
    head = renamed.pop("lm_head.weight", None) if tied else None
    if head is not None and not torch.equal(head, renamed.get("wte.weight", head)):
        fault = "lm_head.weight differs from wte.weight, which config.json ties it to"
        raise InputError(f"{source}: {fault}; set tie_word_embeddings to false")
    return renamed


def names_on_disk(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `names_in_memory`."""
    return {
        name if name == "lm_head.weight" else "transformer." + name.replace(".attn.", ".attn.attention."): tensor
        for name, tensor in tensors.items()
    }


def load(path: str | Path, device: str | torch.device = "cpu") -> tuple[GPTNeo, Tokenizer]:
    """Model (float32, eval mode, plain) and tokenizer of a directory; InputError names the file that does not fit."""
    path = Path(path)
    config = config_from_json(read_json(path / "config.json"), str(path / "config.json"))
    with without_values():
        model = GPTNeo(config)
    tensors, weights = read_weights(path)
    fill(model, names_in_memory(tensors, config.tie_word_embeddings, weights), weights)
    tokenizer = read_vocabulary(path, config.vocab_size)
    return model.to(device).eval(), tokenizer


def save(path: str | Path, model: GPTNeo, tokenizer: Tokenizer, dtype: torch.dtype = torch.float32) -> None:
    """Write the layout that `load` and transformers' `from_pretrained` read, weights in `dtype`."""
    path = Path(path)
    config = config_to_json(model.config) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    end = tokenizer.token_to_id(END_OF_TEXT)
    if end is not None:
        config |= {"bos_token_id": end, "eos_token_id": end}
    tensors = {name: tensor.to(dtype) for name, tensor in names_on_disk(model.state_dict()).items()}
    write_tensors(path / "model.safetensors", tensors)
    write_text(path / "tokenizer.json", tokenizer.to_str(pretty=True))
    write_json(path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT})
    write_json(path / "config.json", config)
