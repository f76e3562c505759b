"""Networks from and to a directory in the Hugging Face layout: configuration, weights, tokenizer.

Modules nest as the tensors are named on disk; SPELLINGS has what else may stand in a name. Some
files also hold what is not used here, such as a causal mask or a copy of the output layer.
"""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from tinystories import checkpoint
from tinystories.checkpoint import CONFIG, TOKENIZER, TOKENIZER_OPTIONS, WEIGHTS, reading
from tinystories.gpt_neo import GPTNeo, GPTNeoConfig
from tinystories.tokenizer import END_OF_TEXT, read_tokenizer

Network = TypeVar("Network", bound=nn.Module)
UNUSED = re.compile(r"\.attention\.(masked_)?bias$|\.(position|token_type)_ids$|^pooler\.")
SPELLINGS = {  # what may stand in the name of a tensor, and what it is here
    r"\b(_orig_mod|module)\.": "",  # of torch.compile, and of training on several devices
    r"^(transformer|roberta|bert)\.": "",
    r"\.gamma$": ".weight",  # of BERT's older files, with the next
    r"\.beta$": ".bias",
}


def config_from_json(kind: type, raw: dict, fixed: dict, **defaults):
    """The dataclass `kind` of a config.json, whose `fixed` entries may be missing but not differ.

    TypeError or ValueError if impossible. A wrong size shows where the tensors do not fit.
    """
    values = defaults | {name: value for name, value in raw.items() if value is not None}
    for name, value in fixed.items():
        if values.get(name, value) != value:
            raise ValueError(f"{name} is {values[name]!r}, not {value!r}")
    names = [field.name for field in dataclasses.fields(kind)]
    return kind(**{name: values[name] for name in names if name in values})


def load_network(
    path: str | Path, kind: str, from_json: Callable[[dict], Network], device: str | torch.device
) -> tuple[Network, Tokenizer]:
    """The network that `from_json` makes of a config.json, and its tokenizer; as for `load`."""
    directory = Path(path)
    raw = checkpoint.read_json(directory / CONFIG)
    remedy = "use another checkpoint; docs/any_model.py takes other language models"
    with reading(directory / CONFIG, f"not {kind}", remedy):
        network = from_json(raw)
    tensors = {}
    weights = checkpoint.weight_files(directory)
    with reading(weights[0], "does not fit the network", "use the files of one checkpoint"):
        for file in weights:
            tensors |= checkpoint.read_tensors(file)
        checkpoint.fill(network, names_in_memory(tensors, network))
    return network.to(device).eval(), read_tokenizer(directory, raw["vocab_size"])


def bare(name: str) -> str:
    """A tensor's name without what differs between files."""
    for spelling, replacement in SPELLINGS.items():
        name = re.sub(spelling, replacement, name)
    return name


def names_in_memory(tensors: dict[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """Tensors by the names of `network.state_dict()`."""
    names = {bare(name): name for name in network.state_dict()}
    renamed = {bare(name): tensor for name, tensor in tensors.items()}
    if "wte.weight" in names:  # a matrix that is also the output layer's, under either name
        head = renamed.pop("lm_head.weight", None)
        if head is not None and not torch.equal(head, renamed.setdefault("wte.weight", head)):
            raise ValueError("lm_head.weight is not wte.weight; see docs/any_model.py")
    used = [name for name in renamed if not UNUSED.search(name)]
    return {names.get(name, name): renamed[name] for name in used}


def save_network(
    path: Path, config: dict, tensors: dict[str, Tensor], tokenizer: Tokenizer, **special: str
) -> None:
    """Write what `load_network` and transformers read; `special` tokens are named by their text."""
    options = {"tokenizer_class": "PreTrainedTokenizerFast"} | special
    checkpoint.write_tensors(path / WEIGHTS[0], tensors)
    checkpoint.write_text(path / TOKENIZER, tokenizer.to_str(pretty=True))
    checkpoint.write_json(path / TOKENIZER_OPTIONS, options)
    checkpoint.write_json(path / CONFIG, config)


def gpt_neo_from_json(raw: dict) -> GPTNeo:
    """The network of a config.json; KeyError, TypeError or ValueError if it is another one."""
    fixed = {"model_type": "gpt_neo", "activation_function": "gelu_new"}
    fixed |= {"tie_word_embeddings": True}
    layers = []
    for kinds, count in raw["attention_types"]:  # [[["global", "local"], 2], ...]
        layers += kinds * count
    raw = raw | {"attention_layers": tuple(layers)}
    inner = 4 * raw["hidden_size"]
    return GPTNeo(config_from_json(GPTNeoConfig, raw, fixed, intermediate_size=inner))


def load(path: str | Path, device: str | torch.device = "cpu") -> tuple[GPTNeo, Tokenizer]:
    """GPT-Neo (float32, eval mode) and tokenizer; InputError names the file that does not fit."""
    return load_network(path, "GPT-Neo", gpt_neo_from_json, device)


def save(
    path: str | Path, model: GPTNeo, tokenizer: Tokenizer, dtype: torch.dtype = torch.float32
) -> None:
    """Write what `load` and transformers' `from_pretrained` read, with weights in `dtype`."""
    tensors = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    config = dataclasses.asdict(model.config)
    config |= {"architectures": ["GPTNeoForCausalLM"], "model_type": "gpt_neo"}
    config["attention_types"] = [[[kind], 1] for kind in config.pop("attention_layers")]
    end = tokenizer.token_to_id(END_OF_TEXT)
    config |= {"bos_token_id": end, "eos_token_id": end}
    save_network(Path(path), config, tensors, tokenizer, eos_token=END_OF_TEXT)
