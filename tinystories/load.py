"""Language models from and to a directory in the Hugging Face layout, or from the Hub.

    config.json                 the shape of the network
    model.safetensors           its tensors, or an older pytorch_model.bin; or model-00001-of-...
    tokenizer.json              its tokenizer, or an older vocab.json with merges.txt

    model, tokenizer = load_model("checkpoints/pocket/lm", "--lm", "Once upon a time", length=20)

GPT-Neo is read by hand: the modules of gpt_neo.py nest as its tensors are named. The scorers of
`eval` are read in the same way. Any other causal language model is that of `transformers`.
"""

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from tinystories import files
from tinystories.decoder import NO_END, Conditional
from tinystories.files import read_json, reading
from tinystories.gpt_neo import GPTNeo, GPTNeoConfig, GPTNeoModel

CONFIG, GENERATION = "config.json", "generation_config.json"
WEIGHTS, OLDER_WEIGHTS = "model.safetensors", "pytorch_model.bin"
TOKENIZER, OLDER_TOKENIZER = "tokenizer.json", ("vocab.json", "merges.txt")
# What files hold beside weights: causal masks, positions, a copy of the tied output layer, and the
# layer behind BERT that sentence encoders do not use.
UNUSED = re.compile(r"\.attention\.(masked_)?bias$|position_ids$|^lm_head\.weight$|^pooler\.")
END_OF_TEXT = "<|endoftext|>"
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(@.+)?")  # OWNER/REPOSITORY@REVISION


@functools.cache  # a branch of the Hub may move meanwhile: one process uses one commit
def checkpoint_directory(name: str, flag: str) -> Path:
    """The directory of the checkpoint that the option `flag` names; ValueError if there is none.

    `name` is a directory, or OWNER/REPOSITORY@REVISION of the Hugging Face Hub, from which only
    what is read here is fetched: the weights as safetensors if it has them.
    """
    if name and (directory := Path(name)).is_dir():
        if (directory / CONFIG).exists():
            return directory
        fault = f"no checkpoint, as it has no {CONFIG}; name another"
        if (directory / "adapter_config.json").exists():
            fault = "an adapter of PEFT alone; save its network with it, after `merge_and_unload`"
        raise ValueError(f"{flag} {name}: {fault}")
    if not HUB_NAME.fullmatch(name):
        raise ValueError(f"{flag} {name}: no such directory; correct its name")
    from huggingface_hub import snapshot_download  # half a second that a directory does not need

    repository, _, revision = name.partition("@")
    wanted = [CONFIG, "1_Pooling/config.json", GENERATION, "tokenizer*.json", *OLDER_TOKENIZER]
    settings = {"revision": revision or None, "allow_patterns": wanted}
    try:
        for weights in ("model*.safetensors*", "pytorch_model*.bin*"):
            wanted.append(weights)
            directory = Path(snapshot_download(repository, **settings))
            if any(directory.glob(weights)):
                break
        return directory
    except Exception as error:  # the libraries that download have no common base class
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"
        fault = f"no such directory, and the Hub does not give it ({reason})"
        remedy = "correct its name, or run `hf download` elsewhere and name the directory"
        raise ValueError(f"{flag} {name}: {fault}; {remedy}") from error


def config_from_json(kind: type, raw: dict, fixed: dict, **defaults: Any) -> Any:
    """The dataclass `kind` of a config.json, whose `fixed` entries may be missing but not differ;
    TypeError or ValueError if impossible."""
    values = defaults | {name: value for name, value in raw.items() if value is not None}
    for name, value in fixed.items():
        if values.get(name, value) != value:
            raise ValueError(f"{name} is {values[name]!r}, not {value!r}")
    names = [field.name for field in dataclasses.fields(kind)]
    return kind(**{name: values[name] for name in names if name in values})


def load_network(
    path: str | Path, kind: str, from_json: Callable[[dict], Any], device: str | torch.device
) -> tuple[Any, Tokenizer]:
    """The network that `from_json` makes of a config.json (float32, eval mode), and its tokenizer;
    ValueError names the file that does not fit."""
    directory = Path(path)
    raw = read_json(directory / CONFIG)
    with reading(directory / CONFIG, f"not {kind}", "use another checkpoint"):
        network = from_json(raw)
    names = [name + ending for name in (WEIGHTS, OLDER_WEIGHTS) for ending in ("", ".index.json")]
    file = directory / next((name for name in names if (directory / name).exists()), WEIGHTS)
    tensors = files.read_tensors(file)
    with reading(file, "does not fit the network", "use the files of one checkpoint"):
        used = {name: tensor for name, tensor in tensors.items() if not UNUSED.search(name)}
        network.load_state_dict(used)  # which also converts them to float32
        check_finite(network)
    return network.to(device).eval(), read_tokenizer(directory, raw["vocab_size"])


def check_finite(network: torch.nn.Module) -> None:
    """ValueError where a parameter is NaN or infinite."""
    for name, parameter in network.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(f"{name} holds NaN, or values infinite in float32")


def save_network(
    path: Path, config: dict, tensors: dict[str, Tensor], tokenizer: Tokenizer, **special: str
) -> None:
    """Write what `load_network` and transformers read; `special` are texts of tokens."""
    files.write_tensors(path / WEIGHTS, tensors)
    files.write_text(path / TOKENIZER, tokenizer.to_str(pretty=True))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | special
    files.write_json(path / "tokenizer_config.json", settings)
    files.write_json(path / CONFIG, config)


def gpt_neo_from_json(raw: dict[str, Any]) -> GPTNeo:
    """A GPT-Neo of the shape of a config.json, its weights not yet loaded."""
    fixed = {"model_type": "gpt_neo", "activation_function": "gelu_new"}
    fixed |= {"tie_word_embeddings": True}
    layers = []
    for kinds, count in raw["attention_types"]:  # [[["global", "local"], 2], ...]
        layers += kinds * count
    defaults = {"intermediate_size": 4 * raw["hidden_size"], "attention_layers": tuple(layers)}
    return GPTNeo(config_from_json(GPTNeoConfig, raw, fixed, **defaults))


def load(path: str | Path, device: str | torch.device = "cpu") -> tuple[GPTNeo, Tokenizer]:
    """GPT-Neo (float32, eval mode) and tokenizer; ValueError names the file that does not fit."""
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


def load_model(
    name: str,
    flag: str,
    prompt: str,
    length: int,
    end: tuple[str, ...] = (),
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[Conditional, Tokenizer]:
    """p(s_{1:T} | s_0) of the checkpoint that the option `flag` names, and its tokenizer.

    s_0 is the prompt, T the length; any token of `end`, given as texts, finishes a text. ValueError
    where they, or the files, do not fit.
    """
    directory = checkpoint_directory(name, flag)
    kind = read_json(directory / CONFIG).get("model_type")
    if kind == "gpt_neo":
        model_class = GPTNeoModel
        network, tokenizer = load(directory, device)
    else:
        try:
            from tinystories.any_model import AnyModel as model_class
        except ImportError as error:
            fault = f"a network of the kind {kind} needs transformers ({error})"
            remedy = "run `pip install transformers`, or name a GPT-Neo"
            raise ValueError(f"{flag} {name}: {fault}; {remedy}") from error
        network, tokenizer = load_any(directory, device)
    check_prompt(tokenizer, prompt)
    ids = encode_prompt(tokenizer, prompt)
    if prompt[-1:].isspace() and encode_prompt(tokenizer, prompt + "girl")[: len(ids)] != ids:
        # Its tokens have the space at the beginning of a word: no word that p knows can follow.
        raise ValueError("the prompt ends in a space; leave the space out")
    vocabulary = tokenizer.get_vocab()
    if unknown := [text for text in end if text not in vocabulary]:
        raise ValueError(f"--end {unknown[0]}: is not one of the tokenizer's tokens; name one")
    ends = tuple(vocabulary[text] for text in end) or NO_END
    tokens = torch.tensor(ids, dtype=torch.long, device=device)  # [P]
    # A network may have room for more tokens than the tokenizer knows: these would have no text.
    vocab_size = max(vocabulary.values()) + 1
    return model_class(network.to(dtype), tokens, length, ends, vocab_size), tokenizer


def load_any(directory: Path, device: str | torch.device) -> tuple[Any, Tokenizer]:
    """A causal language model of transformers (float32), and its tokenizer; ValueError if none."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # what it warns of is refused below
    settings = {"local_files_only": True, "trust_remote_code": False, "dtype": torch.float32}
    auto: Any = transformers.AutoModelForCausalLM
    trouble = "transformers cannot load it as a causal language model"
    with reading(directory, trouble, "install what it lacks, or name another checkpoint"):
        network, found = auto.from_pretrained(directory, output_loading_info=True, **settings)
        if missing := sorted(found["missing_keys"]):  # transformers makes random ones
            raise ValueError(f"weights are missing: {', '.join(missing)}")
        check_finite(network)
    vocab_size = network.config.get_text_config().vocab_size
    return network.to(device), read_tokenizer(directory, vocab_size)


def read_tokenizer(directory: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a directory; ValueError if broken or if a token is not below vocab_size.

    The older files define a byte-level BPE as GPT-2's; TinyStories-33M has these alone.
    """
    vocabulary, merges = (directory / name for name in OLDER_TOKENIZER)
    is_older = not (directory / TOKENIZER).exists() and vocabulary.exists()
    path = vocabulary if is_older else directory / TOKENIZER
    remedy = "let `AutoTokenizer` of transformers write the one of this network"
    with reading(path, "no tokenizer for this network", remedy):
        if is_older:
            tokenizer = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False)])
        else:
            tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        if (largest := max(tokenizer.get_vocab().values())) >= vocab_size:
            raise ValueError(f"token {largest} where the network has {vocab_size} tokens")
    return tokenizer


def unnamed_ends(model: Conditional, tokenizer: Tokenizer, directory: Path) -> list[int]:
    """The tokens of a model that end a text by what the files of its checkpoint say."""
    raw = {}
    for name in (CONFIG, GENERATION, "tokenizer_config.json"):
        if (directory / name).exists():
            raw |= read_json(directory / name)
    tokens, text = raw.get("eos_token_id"), raw.get("eos_token") or ""
    text = text["content"] if isinstance(text, dict) else text
    tokens = {tokenizer.token_to_id(text), *(tokens if isinstance(tokens, list) else [tokens])}
    return [token for token in range(model.vocab_size) if token in tokens]


def check_prompt(tokenizer: Tokenizer, prompt: str) -> None:
    """ValueError where a part of a prompt has no token, so that p would continue another one."""
    if not prompt:
        raise ValueError("the prompt is empty; give at least one word")
    kind = json.loads(tokenizer.to_str())["model"]  # a Unigram has unk_id, the others unk_token
    unknown = kind.get("unk_id", tokenizer.token_to_id(kind.get("unk_token") or ""))
    spans, written = [], set()
    with contextlib.suppress(Exception):  # of a tokenizer without a token for what is unknown
        encoding = tokenizer.encode(prompt, add_special_tokens=False)
        spans = list(zip(encoding.ids, encoding.offsets, strict=True))
    for token, (start, end) in spans:
        if token != unknown or prompt[start:end] == tokenizer.id_to_token(token):
            written.update(range(start, end))
    lost = [c for n, c in enumerate(prompt) if n not in written and not c.isspace()]
    if lost or not spans:
        text = "".join(lost)[:40]
        raise ValueError(f"the tokenizer has no token for {text!r} of the prompt; give another")


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a prompt, without those that a tokenizer adds behind a text, where it would end."""
    encoding = tokenizer.encode(text)
    added = encoding.special_tokens_mask  # 1 where a token is not of the text
    while added and added[-1]:
        added.pop()
    return encoding.ids[: len(added)]
