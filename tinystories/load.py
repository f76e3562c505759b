"""GPT-Neo from and to a Hugging Face layout directory.

Names on disk carry the prefix `transformer.` or none and put the attention's projections under `attn.attention`; some
files also carry the causal mask as buffers (`attn.attention.bias`, `attn.attention.masked_bias`), which are no weights.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tinystories.checkpoint import (
    fill,
    read_json,
    read_weights,
    without_prefix,
    write_json,
    write_tensors,
    write_text,
)
from tinystories.errors import InputError
from tinystories.gpt_neo import GPTNeo, GPTNeoConfig
from tinystories.vocabulary import END_OF_TEXT, read_vocabulary

MASK_BUFFERS = ("attn.attention.bias", "attn.attention.masked_bias")


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
        words = "lm_head.weight differs from wte.weight, which config.json ties it to"
        raise InputError(f"{source}: {words}; set tie_word_embeddings to false")
    return renamed


def names_on_disk(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `names_in_memory`."""
    return {
        name if name == "lm_head.weight" else "transformer." + name.replace(".attn.", ".attn.attention."): tensor
        for name, tensor in tensors.items()
    }


def load(path: str | Path, device: str | torch.device = "cpu") -> tuple[GPTNeo, Tokenizer]:
    """Model (float32, eval mode) and tokenizer of a checkpoint directory; InputError names the file that does not fit."""
    path = Path(path)
    config = GPTNeoConfig.from_dict(read_json(path / "config.json"), str(path / "config.json"))
    with torch.device("meta"):
        model = GPTNeo(config)
    model.to_empty(device="cpu")
    tensors, weights = read_weights(path)
    fill(model, names_in_memory(tensors, config.tie_word_embeddings, weights), weights)
    tokenizer = read_vocabulary(path, config.vocab_size)
    return model.to(device).eval(), tokenizer


def save(path: str | Path, model: GPTNeo, tokenizer: Tokenizer, dtype: torch.dtype = torch.float32) -> None:
    """Write the layout that `load` and transformers' `from_pretrained` read, weights in `dtype`."""
    path = Path(path)
    config = model.config.to_dict() | {"torch_dtype": str(dtype).removeprefix("torch.")}
    end = tokenizer.token_to_id(END_OF_TEXT)
    if end is not None:
        config |= {"bos_token_id": end, "eos_token_id": end}
    tensors = {name: tensor.to(dtype) for name, tensor in names_on_disk(model.state_dict()).items()}
    write_tensors(path / "model.safetensors", tensors)
    write_text(path / "tokenizer.json", tokenizer.to_str(pretty=True))
    write_json(path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT})
    write_json(path / "config.json", config)
