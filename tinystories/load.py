"""Networks from a directory in the Hugging Face layout, or from the Hub; files of JSON and tensors.

    config.json                 the shape of the network
    model.safetensors           its tensors, or an older pytorch_model.bin; or several of either
    tokenizer.json              its tokenizer

GPT-Neo and the scorers are read by hand, other language models by transformers (`any_model.py`).
"""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save
from tokenizers import Tokenizer
from torch import Tensor

from tinystories.decoder import Conditional
from tinystories.gpt_neo import GPTNeo, GPTNeoModel

# Beside weights: causal masks, positions, a copy of the tied output layer, BERT's unused pooler.
UNUSED = re.compile(r"\.attention\.(masked_)?bias$|position_ids$|^lm_head\.weight$|^pooler\.")
CHECKOUT = Path(__file__).resolve().parents[1]
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@\w+)?")  # OWNER/REPOSITORY@REVISION


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: Path, content: bytes) -> None:
    """Write a file, which takes its place only once it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    write(path, (json.dumps(value, indent=2) + "\n").encode())


def write_tensors(path: Path, tensors: dict[str, Tensor], **metadata: str) -> None:
    """Write a safetensors file. The order of several metadata differs from process to process."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write(path, save(tensors, metadata or {"format": "pt"}))


def located(name: str) -> Path:
    """A path of a user, or where there is none of this checkout."""
    return Path(name) if Path(name).exists() else CHECKOUT / name


def checkpoint_directory(name: str) -> Path:
    """A directory, or what OWNER/REPOSITORY@REVISION of the Hub is fetched to."""
    directory = located(name)
    if directory.is_dir() or not HUB_NAME.fullmatch(name):
        return directory
    from huggingface_hub import snapshot_download  # half a second that a directory does not need

    repository, _, revision = name.partition("@")
    for weights in ("*.safetensors", "*.bin"):  # the older files only where there are no others
        files = ["*.json", "merges.txt", "*.model", weights]
        directory = snapshot_download(repository, revision=revision or None, allow_patterns=files)
        if any(Path(directory).glob(weights)):
            break
    return Path(directory)


def load_network(
    directory: Path, network: Any, device: str | torch.device = "cpu"
) -> tuple[Any, Tokenizer]:
    """A network of the shape of a config.json with its weights (float32, eval mode), and its
    tokenizer; RuntimeError where a weight is missing, unexpected or of another shape."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("model*.safetensors")):
        tensors |= load_file(file)
    for file in sorted(directory.glob("pytorch_model*.bin")) if not tensors else []:
        tensors |= torch.load(file, weights_only=True)
    used = {name: tensor for name, tensor in tensors.items() if not UNUSED.search(name)}
    network.load_state_dict(used)  # which also converts them to float32
    output = tensors.get("lm_head.weight")
    if output is not None and not torch.equal(output, tensors["transformer.wte.weight"]):
        raise ValueError("the output layer is not tied to the embeddings, as GPT-Neo's is")
    return network.to(device).eval(), load_tokenizer(directory)


def load_tokenizer(directory: Path) -> Tokenizer:
    """tokenizer.json of networks read by hand; of others what transformers makes of their files."""
    if read_json(directory / "config.json").get("model_type") in ("gpt_neo", "roberta", "bert"):
        tokenizer = Tokenizer.from_str((directory / "tokenizer.json").read_text(encoding="utf-8"))
    else:
        from transformers import AutoTokenizer

        whole = AutoTokenizer.from_pretrained(directory)
        if not whole.is_fast:
            raise ValueError(f"{directory}: its tokenizer is not one of the tokenizers library")
        tokenizer = whole.backend_tokenizer
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def gpt_neo_from_json(raw: dict[str, Any]) -> GPTNeo:
    """A GPT-Neo of the shape of a config.json, its weights not yet loaded."""
    if raw.get("activation_function", "gelu_new") != "gelu_new":
        raise ValueError(f"activation_function is {raw['activation_function']}, not gelu_new")
    shape = {"window_size": 256, "layer_norm_epsilon": 1e-5} | raw
    shape["intermediate_size"] = raw.get("intermediate_size") or 4 * raw["hidden_size"]
    return GPTNeo(SimpleNamespace(**shape))


def load_model(
    name: str,
    prompt: str,
    length: int,
    end: tuple[str, ...] = (),
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[Conditional, Tokenizer]:
    """p(s_{1:T} | s_0) of a checkpoint and its tokenizer: T = length, and any token of `end`, given
    as texts, finishes a text. ValueError where they do not fit the model."""
    directory = checkpoint_directory(name)
    if (directory / "adapter_config.json").exists():
        raise ValueError(f"{name}: holds an adapter; merge it into the weights of its model first")
    raw = read_json(directory / "config.json")
    if raw.get("model_type") == "gpt_neo":
        model_class = GPTNeoModel
        network, _ = load_network(directory, gpt_neo_from_json(raw), device)
    else:
        from tinystories.any_model import AnyModel as model_class
        from tinystories.any_model import load_any

        network = load_any(directory, device)
    tokenizer = load_tokenizer(directory)
    ids = encode_prompt(tokenizer, prompt)
    if prompt[-1:].isspace() and encode_prompt(tokenizer, prompt + "girl")[: len(ids)] != ids:
        # Its tokens have the space at the beginning of a word: no word that p knows can follow.
        raise ValueError("the prompt ends in a space, after which p knows no word; leave it out")
    vocabulary = tokenizer.get_vocab()
    if unknown := [text for text in end if text not in vocabulary]:
        raise ValueError(f"--end {unknown[0]}: is not one of the tokenizer's tokens")
    tokens = torch.tensor(ids, dtype=torch.long, device=device)  # [P]
    ends = tuple(vocabulary[text] for text in end)
    # A network may have room for more tokens than the tokenizer knows: these would have no text.
    vocab_size = max(vocabulary.values()) + 1
    return model_class(network.to(dtype), tokens, length, ends, vocab_size), tokenizer


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a prompt, without those added behind it, or in front of one of its own."""
    encoding = tokenizer.encode(text)
    ids, added = encoding.ids, encoding.special_tokens_mask  # 1 where a token is not of the text
    while added and added[-1]:
        added.pop()
    is_twice = len(added) > 1 and added[0] == 1 and ids[0] == ids[1]
    return ids[is_twice : len(added)]
