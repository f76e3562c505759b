"""GPT-Neo from and to a directory in the Hugging Face layout: configuration, weights, tokenizer.

Names on disk may carry the prefix `transformer.` and put the attention's projections under
`attn.attention`; some files also hold the causal mask as buffers, which are not weights.
"""

from dataclasses import asdict
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tinystories import checkpoint
from tinystories.gpt_neo import GPTNeo, GPTNeoConfig
from tinystories.tokenizer import END_OF_TEXT, read_tokenizer

MASK_BUFFERS = ("attn.attention.bias", "attn.attention.masked_bias")
SIZES = ["vocab_size", "hidden_size", "num_layers", "num_heads", "max_position_embeddings"]
SIZES += ["window_size", "intermediate_size"]


def network_from_json(raw: dict) -> GPTNeo:
    """The network of a config.json; KeyError, TypeError or ValueError if it is another one."""
    kind = (raw["model_type"], raw.get("activation_function", "gelu_new"))
    if kind != ("gpt_neo", "gelu_new"):
        raise ValueError(f"its model and activation are {kind}, not gpt_neo and gelu_new")
    fields = {"window_size": 256, "intermediate_size": 4 * raw["hidden_size"]}
    fields |= {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
    fields |= {name: value for name, value in raw.items() if value is not None}
    sizes = checkpoint.network_sizes(fields, SIZES, "num_heads", "layer_norm_epsilon")
    layers = []
    for kinds, count in fields["attention_types"]:  # [[["global", "local"], 2], ...]
        layers += list(kinds) * min(count, sizes["num_layers"] + 1)
    if len(layers) != sizes["num_layers"] or not set(layers) <= {"global", "local"}:
        raise ValueError(f"attention_types must name {sizes['num_layers']} global or local layers")
    config = GPTNeoConfig(
        **sizes,
        attention_layers=tuple(layers),
        tie_word_embeddings=bool(fields["tie_word_embeddings"]),
    )
    return GPTNeo(config)


def config_to_json(config: GPTNeoConfig) -> dict:
    """The config.json of a network, as transformers reads it."""
    fields = asdict(config)
    fields["attention_types"] = [[[kind], 1] for kind in fields.pop("attention_layers")]
    return {"architectures": ["GPTNeoForCausalLM"], "model_type": "gpt_neo"} | fields


def names_in_memory(tensors: dict[str, Tensor], tied: bool) -> dict[str, Tensor]:
    """Tensors by the names of `GPTNeo.state_dict`; ValueError if a tied head is not the same."""
    renamed = {}
    for name, tensor in tensors.items():
        if not name.endswith(MASK_BUFFERS):
            inner = name.removeprefix("transformer.").replace("attn.attention.", "attn.")
            if inner in renamed:
                raise ValueError(f"{inner} is there with and without its prefix")
            renamed[inner] = tensor
    head = renamed.pop("lm_head.weight", None) if tied else None
    if head is not None and not torch.equal(head, renamed["wte.weight"]):
        raise ValueError("lm_head.weight differs from wte.weight, which config.json ties it to")
    return renamed


def names_on_disk(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `names_in_memory`."""
    renamed = {}
    for name, tensor in tensors.items():
        inner = "transformer." + name.replace(".attn.", ".attn.attention.")
        renamed[name if name == "lm_head.weight" else inner] = tensor
    return renamed


def load(path: str | Path, device: str | torch.device = "cpu") -> tuple[GPTNeo, Tokenizer]:
    """Model (float32, eval mode) and tokenizer; InputError names the file that does not fit."""
    model = checkpoint.empty_network(path, "GPT-Neo", network_from_json)
    tensors, source = checkpoint.read_weights(path)
    with checkpoint.reading(source, "does not fit the network", "use the files of one checkpoint"):
        checkpoint.fill(model, names_in_memory(tensors, model.config.tie_word_embeddings))
    tokenizer = read_tokenizer(path, model.config.vocab_size)
    return model.to(device).eval(), tokenizer


def save(
    path: str | Path, model: GPTNeo, tokenizer: Tokenizer, dtype: torch.dtype = torch.float32
) -> None:
    """Write the layout that `load` and transformers' `from_pretrained` read, weights in `dtype`."""
    config = config_to_json(model.config)
    config["bos_token_id"] = tokenizer.token_to_id(END_OF_TEXT)
    config["eos_token_id"] = tokenizer.token_to_id(END_OF_TEXT)
    tensors = {name: tensor.to(dtype) for name, tensor in names_on_disk(model.state_dict()).items()}
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
    checkpoint.write_tensors(Path(path) / "model.safetensors", tensors)
    checkpoint.write_text(Path(path) / "tokenizer.json", tokenizer.to_str(pretty=True))
    checkpoint.write_json(Path(path) / "tokenizer_config.json", options)
    checkpoint.write_json(Path(path) / "config.json", config)
