"""Networks from a directory in the Hugging Face layout, or from the Hub; files of JSON and tensors.

    config.json                 the shape of the network
    model.safetensors           its tensors, or an older pytorch_model.bin; or several of either
    tokenizer.json              its tokenizer, or an older vocab.json with merges.txt

    model, tokenizer = load_model("checkpoints/pocket/lm", "Once upon a time", length=20)

GPT-Neo is read by hand: the modules of gpt_neo.py nest as the tensors of a checkpoint are named, so
loading is `load_state_dict`. The scorers of `eval` are read in the same way. Any other causal
language model, with its tokenizer, is that of `transformers`.
"""

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from tinystories.decoder import Conditional
from tinystories.gpt_neo import GPTNeo, GPTNeoConfig, GPTNeoModel

# What files hold beside weights: causal masks, positions, a copy of the tied output layer, and the
# layer behind BERT that sentence encoders do not use.
UNUSED = re.compile(r"\.attention\.(masked_)?bias$|position_ids$|^lm_head\.weight$|^pooler\.")
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@\w+)?")  # OWNER/REPOSITORY@REVISION


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Whatever reading the file raises names it; the command prints such notes (`eval/job.py`)."""
    try:
        yield
    except Exception as error:
        error.add_note(str(path))
        raise


def read_json(path: Path) -> Any:
    with naming(path):
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


def checkpoint_directory(name: str) -> Path:
    """The directory of a checkpoint, or what OWNER/REPOSITORY@REVISION of the Hub is fetched to.

    Only what is read here is fetched: the weights as safetensors if the repository has them.
    """
    directory = Path(name)
    if directory.is_dir() or not HUB_NAME.fullmatch(name):
        return directory
    from huggingface_hub import snapshot_download  # half a second that a directory does not need

    repository, _, revision = name.partition("@")
    files = ["*.json", "merges.txt", "*.model"]
    for weights in WEIGHTS:
        files.append(weights)
        settings = {"revision": revision or None, "allow_patterns": files}
        directory = Path(snapshot_download(repository, **settings))
        if any(directory.glob(weights)):
            break
    return directory


def config_from_json(kind: type, raw: dict, fixed: dict, **defaults: Any) -> Any:
    """The dataclass `kind` of a config.json; ValueError where one of its `fixed` entries, which may
    be missing, has another value."""
    values = defaults | {name: value for name, value in raw.items() if value is not None}
    for name, value in fixed.items():
        if values.get(name, value) != value:
            raise ValueError(f"config.json: {name} is {values[name]!r}, not {value!r}")
    names = [field.name for field in dataclasses.fields(kind)]
    return kind(**{name: values[name] for name in names if name in values})


def read_weights(directory: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name, of one file or of several."""
    files = sorted(directory.glob(WEIGHTS[0])) or sorted(directory.glob(WEIGHTS[1]))
    tensors = {}
    for file in files:
        with naming(file):
            is_older = file.suffix == ".bin"
            tensors |= torch.load(file, weights_only=True) if is_older else load_file(file)
    return tensors


def load_network(
    directory: Path, from_json: Callable[[dict], Any], device: str | torch.device = "cpu"
) -> tuple[Any, Tokenizer]:
    """The network that `from_json` makes of a config.json (float32, eval mode), and its tokenizer;
    RuntimeError where a weight is missing, unexpected or of another shape."""
    network = from_json(read_json(directory / "config.json"))
    tensors = read_weights(directory)
    used = {name: tensor for name, tensor in tensors.items() if not UNUSED.search(name)}
    with naming(directory):
        network.load_state_dict(used)  # which also converts them to float32
        output = tensors.get("lm_head.weight")
        if output is not None and not torch.equal(output, tensors["transformer.wte.weight"]):
            raise ValueError("its output layer is not tied to its embeddings, as GPT-Neo's is")
    return network.to(device).eval(), read_tokenizer(directory)


def read_tokenizer(directory: Path) -> Tokenizer:
    """tokenizer.json; or the byte-level BPE of older files, which TinyStories-33M alone has."""
    path = directory / "tokenizer.json"
    vocabulary = directory / "vocab.json"
    with naming(path):
        if path.exists() or not vocabulary.exists():
            tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        else:
            bpe = models.BPE.from_file(str(vocabulary), str(directory / "merges.txt"))
            tokenizer = Tokenizer(bpe)
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            tokenizer.add_special_tokens([AddedToken("<|endoftext|>", normalized=False)])
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def gpt_neo_from_json(raw: dict[str, Any]) -> GPTNeo:
    """A GPT-Neo of the shape of a config.json, its weights not yet loaded."""
    fixed = {"model_type": "gpt_neo", "activation_function": "gelu_new"}
    fixed |= {"tie_word_embeddings": True}
    layers = []
    for kinds, count in raw["attention_types"]:  # [[["global", "local"], 2], ...]
        layers += kinds * count
    defaults = {"intermediate_size": 4 * raw["hidden_size"], "attention_layers": tuple(layers)}
    return GPTNeo(config_from_json(GPTNeoConfig, raw, fixed, **defaults))


def load_model(
    name: str,
    prompt: str,
    length: int,
    end: tuple[str, ...] = (),
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[Conditional, Tokenizer]:
    """p(s_{1:T} | s_0) of a checkpoint, and its tokenizer; s_0 is the prompt, T the length.

    Any token of `end`, given as texts, finishes a text. ValueError where they do not fit the model.
    """
    directory = checkpoint_directory(name)
    if read_json(directory / "config.json").get("model_type") == "gpt_neo":
        model_class = GPTNeoModel
        network, tokenizer = load_network(directory, gpt_neo_from_json, device)
    else:
        from tinystories.any_model import AnyModel as model_class
        from tinystories.any_model import load_any

        network, tokenizer = load_any(directory, device)
    ids = encode_prompt(tokenizer, prompt)
    if prompt[-1:].isspace() and encode_prompt(tokenizer, prompt + "girl")[: len(ids)] != ids:
        # Its tokens have the space at the beginning of a word: no word that p knows can follow.
        raise ValueError("the prompt ends in a space, after which p knows no word; leave it out")
    vocabulary = tokenizer.get_vocab()
    if unknown := [text for text in end if text not in vocabulary]:
        raise ValueError(f"--end {unknown[0]}: is not one of the tokenizer's tokens")
    ends = tuple(vocabulary[text] for text in end)
    tokens = torch.tensor(ids, dtype=torch.long, device=device)  # [P]
    # A network may have room for more tokens than the tokenizer knows: these would have no text.
    vocab_size = max(vocabulary.values()) + 1
    return model_class(network.to(dtype), tokens, length, ends, vocab_size), tokenizer


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a prompt, without those that a tokenizer adds behind a text, where it would end."""
    encoding = tokenizer.encode(text)
    added = encoding.special_tokens_mask  # 1 where a token is not of the text
    while added and added[-1]:
        added.pop()
    return encoding.ids[: len(added)]
