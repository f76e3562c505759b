"""Random networks of transformers in the three roles, written to disk with their tokenizers."""

import copy
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn

import tinystories
from eval.scorers import similarity, toxicity
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
SCORER = {"toxicity": toxicity.ToxicityScorer, "similarity": similarity.SimilarityScorer}
PREFIX = {"lm": "transformer.", "toxicity": "roberta.", "similarity": "bert."}
VOCABULARY = {"lm": "gpt2", "toxicity": "roberta", "similarity": "bert"}
SPECIAL = {
    "gpt2": [END_OF_TEXT],
    "roberta": ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
    "bert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
}
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
            is_scale = name.endswith("weight")  # of a LayerNorm
            parameter.data = is_scale + 0.3 * noise
        else:
            is_table = "embeddings" in name or "wte" in name or "wpe" in name
            parameter.data = noise if is_table else noise / parameter.shape[1] ** 0.5
    return model.eval()


def oracle(role: str, seed: int = 0, **changes) -> transformers.PreTrainedModel:
    """A small random network of transformers."""
    if role == "lm":
        shape = {"vocab_size": VOCAB_SIZE, "hidden_size": 24, "num_layers": 2, "num_heads": 3}
        shape |= {"max_position_embeddings": LIMIT, "window_size": 4}
        shape |= {"attention_types": [[["global", "local"], 1]]}
        config = transformers.GPTNeoConfig(**(shape | changes))
        return randomise(transformers.GPTNeoForCausalLM(config), seed)
    shape = {"vocab_size": VOCAB_SIZE, "hidden_size": 24, "num_hidden_layers": 3}
    shape |= {"num_attention_heads": 4, "intermediate_size": 40, "layer_norm_eps": 1e-5}
    if role == "toxicity":
        shape |= {"max_position_embeddings": LIMIT + 2, "type_vocab_size": 1, "num_labels": 1}
        config = transformers.RobertaConfig(**(shape | {"pad_token_id": 1} | changes))
        return randomise(transformers.RobertaForSequenceClassification(config), seed)
    shape |= {"max_position_embeddings": LIMIT, "type_vocab_size": 2}
    return randomise(transformers.BertModel(transformers.BertConfig(**(shape | changes))), seed)


def write_vocabulary(path: Path, kind: str, **options) -> None:
    """The files of a repository without tokenizer.json, trained on a few texts."""
    special, corpus = SPECIAL[kind], TEXTS * 3 + [text.lower() for text in TEXTS]
    if kind == "bert":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(
            vocab_size=150, special_tokens=special, show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.model.save(str(path))
    name = {"gpt2": "GPT2Tokenizer", "roberta": "RobertaTokenizer", "bert": "BertTokenizer"}[kind]
    write_json(path / "tokenizer_config.json", {"tokenizer_class": name} | options)


def write_tokenizer(path: Path, role: str) -> Tokenizer:
    """A tokenizer.json that fits the role, and what transformers needs beside it."""
    write_vocabulary(path, VOCABULARY[role])
    tokenizer = read_tokenizer(path, VOCAB_SIZE)
    for name in ("vocab.json", "merges.txt", "vocab.txt"):
        (path / name).unlink(missing_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    pad = {"lm": END_OF_TEXT, "toxicity": "<pad>", "similarity": "[PAD]"}[role]
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": pad}
    write_json(path / "tokenizer_config.json", options)
    return tokenizer


def write_checkpoint(path: Path, role: str, **changes) -> transformers.PreTrainedModel:
    """A directory written by transformers, and the network in it."""
    network = oracle(role, **changes)
    network.save_pretrained(path)
    write_tokenizer(path, role)
    return network


def edit(source: Path, target: Path, change) -> Path:
    """A copy of a checkpoint whose tensors went through `change`."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    tensors = load_file(source / "model.safetensors")
    save_file(change(copy.copy(tensors)), target / "model.safetensors")
    return target


def encoded(path: Path, texts: list[str], limit: int = LIMIT) -> dict[str, Tensor]:
    """Tokens and mask of padded texts, by the tokenizer of transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    options = {"padding": True, "truncation": True, "max_length": limit, "return_tensors": "pt"}
    return dict(tokenizer(texts, return_token_type_ids=False, **options))


@torch.no_grad()
def expected(role: str, network, inputs: dict[str, Tensor]) -> Tensor:
    """What a network of transformers makes of tokens: logits, or unit vectors."""
    if role == "lm":
        return network(**inputs).logits
    if role == "toxicity":
        return network(**inputs).logits[:, 0]
    kept, hidden = inputs["attention_mask"].bool(), network(**inputs).last_hidden_state
    means = [row[keep].mean(0) for row, keep in zip(hidden, kept, strict=True)]
    return F.normalize(torch.stack(means), dim=-1)


def assert_close(actual: Tensor, wanted: Tensor) -> None:
    """Within 2e-5 of the largest wanted value."""
    assert actual.shape == wanted.shape and actual.dtype == torch.float32
    assert (actual - wanted).abs().max() <= 2e-5 * wanted.abs().max()
