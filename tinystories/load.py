"""Networks from and to a directory in the Hugging Face layout: configuration, weights, tokenizer.

The same tensor has several names on disk, which SPELLINGS brings to one. Some files also hold what
is not used here, such as a causal mask.
"""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tinystories import checkpoint
from tinystories.checkpoint import reading
from tinystories.gpt_neo import GPTNeo, GPTNeoConfig
from tinystories.tokenizer import END_OF_TEXT, read_tokenizer

SPELLINGS = {  # what may stand in the name of a tensor, and what it is here
    r"\b(_orig_mod|module)\.": "",  # of torch.compile, and of training on several devices
    r"^(transformer|roberta|bert)\.": "",
    r"\.attn\.attention\.": ".attn.",  # of GPT-Neo
    r"\.gamma$": ".weight",  # of BERT's older files, with the next
    r"\.beta$": ".bias",
}
Network = TypeVar("Network", bound=nn.Module)
UNUSED = re.compile(r"\.attn\.(masked_)?bias$|^embeddings\.(position|token_type)_ids$|^pooler\.")


def config_from_json(kind: type, raw: dict, fixed: dict, **defaults):
    """The dataclass `kind` of a config.json, whose `fixed` entries may be missing but not differ.

    KeyError, TypeError or ValueError if impossible. Integers are sizes or tokens.
    """
    values = defaults | {name: value for name, value in raw.items() if value is not None}
    for name, value in fixed.items():
        if values.get(name, value) != value:
            raise ValueError(f"{name} is {values[name]!r}, not {value}")
    fields = dataclasses.fields(kind)
    config = kind(**{field.name: values[field.name] for field in fields if field.name in values})
    for field in fields:
        name, value = field.name, getattr(config, field.name)
        least = 0 if name.endswith("_id") else 1
        most = 1000 if name.endswith("layers") else 10**7  # layers are built before they are read
        if field.type is int and not (type(value) is int and least <= value <= most):
            raise ValueError(f"{name} is {value!r}, not an integer from {least} to {most}")
        if name.endswith("heads") and config.hidden_size % value:
            raise ValueError(f"hidden_size must be a multiple of {name}")
        if name.endswith("_id") and value >= config.vocab_size:
            raise ValueError(f"{name} must be a token")
    return config


class NoDraws(TorchFunctionMode):
    """Omits random initial values: even without memory, drawing them loads PyTorch's compiler."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return None if function is nn.init.normal_ else function(*args, **(kwargs or {}))


def bare(name: str) -> str:
    """A tensor's name without what differs between files and networks."""
    for spelling, replacement in SPELLINGS.items():
        name = re.sub(spelling, replacement, name)
    return name


def names_in_memory(tensors: dict[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """Tensors by the names of `network.state_dict()`; ValueError if two tensors contradict."""
    names = {bare(name): name for name in network.state_dict()}
    renamed = {}
    for on_disk, tensor in tensors.items():
        name = names.get(bare(on_disk), bare(on_disk))
        if name in renamed:
            raise ValueError(f"{name} is there under two names")
        if not UNUSED.search(name):
            renamed[name] = tensor
    # Where both layers share one matrix, a file has it under either name or under both.
    is_tied = "wte.weight" in names and "lm_head.weight" not in names
    head = renamed.pop("lm_head.weight", None) if is_tied else None
    if head is not None and not torch.equal(head, renamed.setdefault("wte.weight", head)):
        raise ValueError("lm_head.weight differs from wte.weight, which config.json ties it to")
    return renamed


def load_network(
    path: str | Path, kind: str, from_json: Callable[[dict], Network], device: str | torch.device
) -> tuple[Network, Tokenizer]:
    """The network that `from_json` makes of a config.json, and its tokenizer; as for `load`."""
    directory = Path(path)
    config = directory / "config.json"
    raw = checkpoint.read_json(config)
    with reading(config, f"not {kind}", "use another checkpoint"), torch.device("meta"), NoDraws():
        network = from_json(raw)
    tensors = {}
    weights = checkpoint.weight_files(directory)
    for file in weights:
        tensors |= checkpoint.read_tensors(file)
    with reading(weights[0], "does not fit the network", "use the files of one checkpoint"):
        checkpoint.fill(network, names_in_memory(tensors, network))
    return network.to(device).eval(), read_tokenizer(directory, raw["vocab_size"])


def save_network(
    path: Path, config: dict, tensors: dict[str, Tensor], tokenizer: Tokenizer, **special: str
) -> None:
    """Write what `load_network` and transformers read; `special` tokens are named by their text."""
    options = {"tokenizer_class": "PreTrainedTokenizerFast"} | special
    checkpoint.write_tensors(path / "model.safetensors", tensors)
    checkpoint.write_text(path / "tokenizer.json", tokenizer.to_str(pretty=True))
    checkpoint.write_json(path / checkpoint.TOKENIZER_OPTIONS, options)
    checkpoint.write_json(path / "config.json", config)


def gpt_neo_from_json(raw: dict) -> GPTNeo:
    """The network of a config.json; KeyError, TypeError or ValueError if it is another one."""
    if (kind := raw.get("model_type") or "gpt_neo") != "gpt_neo":
        raise ValueError(f"model_type is {kind!r}, not gpt_neo; docs/any_model.py takes others")
    fixed = {"activation_function": "gelu_new"}
    defaults = {"intermediate_size": 4 * raw.get("hidden_size", 0), "attention_layers": ()}
    config = config_from_json(GPTNeoConfig, raw, fixed, **defaults)
    layers = []
    for kinds, count in raw["attention_types"]:  # [[["global", "local"], 2], ...]
        layers += list(kinds) * min(count, config.num_layers + 1)
    if len(layers) != config.num_layers or not set(layers) <= {"global", "local"}:
        raise ValueError(f"attention_types must name {config.num_layers} global or local layers")
    return GPTNeo(dataclasses.replace(config, attention_layers=tuple(layers)))


def config_to_json(config: GPTNeoConfig) -> dict:
    """The config.json of a network, as transformers reads it."""
    fields = dataclasses.asdict(config)
    fields["attention_types"] = [[[kind], 1] for kind in fields.pop("attention_layers")]
    return {"architectures": ["GPTNeoForCausalLM"], "model_type": "gpt_neo"} | fields


def names_on_disk(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `names_in_memory` for GPT-Neo."""
    outer = {name: "transformer." + name.replace(".attn.", ".attn.attention.") for name in tensors}
    outer["lm_head.weight"] = "lm_head.weight"
    return {outer[name]: tensor for name, tensor in tensors.items()}


def load(path: str | Path, device: str | torch.device = "cpu") -> tuple[GPTNeo, Tokenizer]:
    """GPT-Neo (float32, eval mode) and tokenizer; InputError names the file that does not fit."""
    return load_network(path, "GPT-Neo", gpt_neo_from_json, device)


def save(
    path: str | Path, model: GPTNeo, tokenizer: Tokenizer, dtype: torch.dtype = torch.float32
) -> None:
    """Write what `load` and transformers' `from_pretrained` read, with weights in `dtype`."""
    tensors = {name: tensor.to(dtype) for name, tensor in names_on_disk(model.state_dict()).items()}
    end = tokenizer.token_to_id(END_OF_TEXT)
    config = config_to_json(model.config) | {"bos_token_id": end, "eos_token_id": end}
    save_network(Path(path), config, tensors, tokenizer, eos_token=END_OF_TEXT)
