"""Random networks of transformers in the three roles, written to disk with their tokenizers."""

from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn

import tinystories
from eval.scorers import similarity, toxicity
from tinystories.any_model import AnyModel
from tinystories.checkpoint import write_json
from tinystories.tokenizer import END_OF_TEXT, read_tokenizer

TEXTS = [
    "Once upon a time, there was a small dog who liked to bark at the moon every night.",
    "No.",
    "The cat sat on the mat, and it was happy.",
    "",
    " The  Cat's hat, café 猫!\n a <mask>",
    "Lily saw a big red ball in the park. She ran to it and kicked it as far as she could!",
]
VOCAB_SIZE, LIMIT = 340, 40  # LIMIT: tokens that the scorers have room for
LOAD = {"lm": tinystories.load, "toxicity": toxicity.load, "similarity": similarity.load}
SAVE = {"lm": tinystories.save, "toxicity": toxicity.save, "similarity": similarity.save}
KIND = {"lm": "gpt2", "toxicity": "roberta", "similarity": "bert"}
SPECIAL = {
    "gpt2": [END_OF_TEXT],
    "roberta": ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
    "bert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
}
PROMPT = torch.tensor([1, 0, 2])
SIZES = {"vocab_size": 3, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 16, "num_key_value_heads": 1, "max_position_embeddings": 16}
SIZES |= {"bos_token_id": 0, "eos_token_id": None}
AUTO = {
    "lm": transformers.AutoModelForCausalLM,
    "toxicity": transformers.AutoModelForSequenceClassification,
    "similarity": transformers.AutoModel,
}


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
    """A small random network of transformers."""
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 24, "max_position_embeddings": LIMIT}
    if role == "lm":
        sizes |= {"num_layers": 2, "num_heads": 3, "window_size": 4}
        sizes |= {"attention_types": [[["global", "local"], 1]]}
        config = transformers.GPTNeoConfig(**(sizes | changes))
        return randomise(transformers.GPTNeoForCausalLM(config), seed=0)
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40}
    if role == "similarity":
        config = transformers.BertConfig(**(sizes | changes))
        return randomise(transformers.BertModel(config), seed=0)
    sizes |= {"max_position_embeddings": LIMIT + 2, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
    config = transformers.RobertaConfig(**(sizes | {"num_labels": 1} | changes))
    return randomise(transformers.RobertaForSequenceClassification(config), seed=0)


def any_model(kind: str, prompt: Tensor | list = PROMPT, length: int = 4, **changes) -> AnyModel:
    """A random network of V = 3 tokens after a prompt, float64."""
    config = transformers.AutoConfig.for_model(kind, **(SIZES | changes))
    network = randomise(transformers.AutoModelForCausalLM.from_config(config), 1).double()
    network.get_output_embeddings().weight.data *= 0.4  # no token is very rare
    return AnyModel(network, prompt, length)


def write_vocabulary(path: Path, kind: str, **options) -> None:
    """The files of a repository without tokenizer.json, trained on a few texts."""
    special = {"special_tokens": SPECIAL[kind], "show_progress": False}
    if kind == "bert":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=150, **special)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, **special)
    tokenizer.train_from_iterator(TEXTS * 3 + [text.lower() for text in TEXTS], trainer)
    tokenizer.model.save(str(path))
    name = {"gpt2": "GPT2Tokenizer", "roberta": "RobertaTokenizer", "bert": "BertTokenizer"}[kind]
    write_json(path / "tokenizer_config.json", {"tokenizer_class": name} | options)


def write(path: Path, role: str, network, layout: str = "", dtype=torch.float32) -> None:
    """Save a network in `dtype` and a tokenizer; layouts are shards, "bin" and "old bin"."""
    network.to(dtype)
    network.save_pretrained(path, max_shard_size="10KB" if layout == "shards" else "1GB")
    network.float()
    write_vocabulary(path, KIND[role])
    tokenizer = read_tokenizer(path, VOCAB_SIZE)
    for name in ("vocab.json", "merges.txt", "vocab.txt"):
        (path / name).unlink(missing_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    pad = {"lm": END_OF_TEXT, "toxicity": "<pad>", "similarity": "[PAD]"}[role]
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": pad}
    write_json(path / "tokenizer_config.json", options)
    if "bin" not in layout:
        return
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    is_new = layout != "old bin"
    torch.save(weights, path / "pytorch_model.bin", _use_new_zipfile_serialization=is_new)


def encoded(path: Path, texts: list[str], limit: int = LIMIT) -> dict[str, Tensor]:
    """Tokens and mask of padded texts, by the tokenizer of transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    options = {"padding": True, "truncation": True, "max_length": limit, "return_tensors": "pt"}
    return dict(tokenizer(texts, return_token_type_ids=False, **options))


@torch.no_grad()
def expected(role: str, network, inputs: dict[str, Tensor], pooling: str = "mean") -> Tensor:
    """What a network of transformers makes of tokens: logits, or unit vectors."""
    output = network(**inputs)
    if role == "lm":
        return output.logits
    if role == "toxicity":
        return output.logits[:, 0]
    if pooling == "cls":
        return F.normalize(output.last_hidden_state[:, 0], dim=-1)
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
