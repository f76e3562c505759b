"""The transformer encoder that BERT and RoBERTa share, and running it over many texts.

    x = LayerNorm(word[token] + position[place] + type[0])                            [B, T, D]
    x = LayerNorm(x + attention(x)),  x = LayerNorm(x + W_2 gelu(W_1 x))              per layer, norm after the sum
    attention = softmax(q k^T / sqrt(D/H) + bias) v,  bias = 0 on text, lowest number on padding

Every token sees every other; gelu is the exact one (erf). The modules nest as the tensors of a Hugging Face checkpoint
are named, so that an error about a tensor names what is in the file.

B batch, T tokens, D width, H heads.
"""

import dataclasses
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from tinystories.checkpoint import (
    fill,
    read_json,
    read_weights,
    tokenizer_files,
    without_prefix,
    write_json,
    write_tensors,
    write_text,
)
from tinystories.errors import InputError
from tinystories.fields import MOST_LAYERS, Fields
from tinystories.layers import LinearGELU
from tinystories.vocabulary import read_vocabulary

UNUSED = ("embeddings.position_ids", "embeddings.token_type_ids", "pooler.dense.weight", "pooler.dense.bias")
LAYERS = "num_hidden_layers"
PADDING = {"bert": 0, "roberta": 1}  # where config.json names no pad_token_id
MAX_TOKENS = 2**13  # of a batch: the widest activations of RoBERTa-base then take 100 MB
ENOUGH_TOKENS = 2**9  # from which a batch is large enough for fast products
LONGER = 1.1  # a text that is so many times as long as the shortest begins a new batch, if the last has enough tokens
SPECIAL_TOKENS = {
    "bos_token": ("<s>",),
    "eos_token": ("</s>",),
    "cls_token": ("[CLS]", "<s>"),
    "sep_token": ("[SEP]", "</s>"),
    "unk_token": ("[UNK]", "<unk>"),
    "mask_token": ("[MASK]", "<mask>"),
}


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """The fields of a Hugging Face `config.json` that shape the network."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float = 1e-12
    pad_token_id: int = 0

    @classmethod
    def from_dict(cls, raw: dict, source: str, model_type: str) -> "EncoderConfig":
        """Read `config.json`; InputError, naming `source`, where it is no such encoder ("bert" or "roberta")."""
        fields = Fields(raw, source, model_type)
        fields.word("hidden_act", "gelu")
        fields.word("position_embedding_type", "absolute")
        sizes = {item.name: fields.whole(item.name) for item in dataclasses.fields(cls)[:7] if item.name != LAYERS}
        if sizes["hidden_size"] % sizes["num_attention_heads"]:
            fields.refuse("hidden_size is no multiple of num_attention_heads")
        return cls(
            **sizes,
            num_hidden_layers=fields.whole(LAYERS, within=(1, MOST_LAYERS)),
            layer_norm_eps=fields.number("layer_norm_eps", 1e-12),
            pad_token_id=fields.whole("pad_token_id", PADDING[model_type], (0, sizes["vocab_size"] - 1)),
        )

    def to_dict(self) -> dict:
        """The same fields in the Hugging Face layout, without those that differ between BERT and RoBERTa."""
        fixed = {"hidden_act": "gelu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return fixed | dataclasses.asdict(self)


class Embeddings(nn.Module):
    """Word, place and type of each token; the type is always 0."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Tokens [B, T] at positions [B, T] or [T] -> [B, T, D]"""
        words = self.word_embeddings(ids) + self.token_type_embeddings.weight[0]  # [B, T, D]
        return self.LayerNorm(words + self.position_embeddings(positions))


class SelfAttention(nn.Module):
    """Multi-head attention of all tokens to all tokens that are no padding."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """[B, T, D], bias added to the scores [B, 1, 1, T] -> [B, T, D]"""
        q, k, v = (
            project(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )  # [B, H, T, D/H]
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + bias  # [B, H, T, T]
        mixed = scores.softmax(-1).to(v.dtype) @ v  # [B, H, T, D/H]
        return mixed.transpose(1, 2).flatten(-2)  # [B, T, D]


class Residual(nn.Module):
    """LayerNorm(x + W y): how attention and the feed-forward network join the stream."""

    def __init__(self, inner: int, config: EncoderConfig):
        super().__init__()
        self.dense = nn.Linear(inner, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x [B, T, D], y [B, T, inner] -> [B, T, D]"""
        return self.LayerNorm(x + self.dense(y))


class Layer(nn.Module):
    """Post-norm transformer layer."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.attention = nn.ModuleDict(
            {"self": SelfAttention(config), "output": Residual(config.hidden_size, config)},
        )
        self.intermediate = nn.ModuleDict({"dense": LinearGELU(config.hidden_size, config.intermediate_size)})
        self.output = Residual(config.intermediate_size, config)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]"""
        x = self.attention["output"](x, self.attention["self"](x, bias))
        return self.output(x, self.intermediate["dense"](x))


class Encoder(nn.Module):
    """Hidden states of texts; where the positions start is left to the two networks built on it."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))})

    def hidden(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [B, T, D] of tokens [B, T]; mask [B, T] is 0 on padding; positions [B, T] or [T]."""
        x = self.embeddings(ids, positions)  # [B, T, D]
        bias = torch.zeros(mask.shape, device=x.device).masked_fill(mask == 0, torch.finfo(torch.float32).min)  # [B, T]
        for layer in self.encoder["layer"]:
            x = layer(x, bias[:, None, None, :])
        return x


class Runner:
    """A network run over texts: tokenized, truncated, sorted by length, batched and padded.

    A batch holds at most `batch_size` texts and MAX_TOKENS tokens, padding included, which bounds its memory, and once it has
    ENOUGH_TOKENS only texts of nearly one length.
    `model` has `max_tokens`, `pad_token_id` and maps ids [B, T] and mask [B, T] to [B, ...].
    """

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, batch_size: int):
        if batch_size < 1:
            raise InputError(f"batch_size is {batch_size}; give at least 1")
        self.model, self.batch_size = model, batch_size
        self.tokenizer = Tokenizer.from_str(tokenizer.to_str())  # truncation is set on a copy, not on the caller's
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(model.max_tokens)  # counts the special tokens, so the last one stays

    def __call__(self, texts: list[str]) -> Tensor:
        """Results [N, ...] on the CPU in the order of the texts; InputError where one is NaN or infinite."""
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts))]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        batches = self.batches([rows[i] for i in order])
        with torch.inference_mode():
            results = torch.cat([self.model(*self.pad(batch)) for batch in batches]).cpu()  # [N, ...]
        results = results[torch.tensor(order, dtype=torch.long).argsort()]
        bad = (~torch.isfinite(results)).nonzero()
        if len(bad):
            text = texts[int(bad[0, 0])]
            raise InputError(f"the score of {text[:60]!r} is NaN or infinite; restore the checkpoint of the scorer")
        return results

    def batches(self, rows: list[list[int]]) -> list[list[list[int]]]:
        """Rows, from short to long, in batches; of no rows one empty batch, whose result has the right shape."""
        batches: list[list[list[int]]] = [[]]
        for row in rows:
            last, size = batches[-1], len(batches[-1])
            is_full = size == self.batch_size or (size + 1) * len(row) > MAX_TOKENS
            is_longer = size > 0 and len(row) > LONGER * len(last[0]) and size * len(last[-1]) >= ENOUGH_TOKENS
            if size > 0 and (is_full or is_longer):
                batches.append([])
            batches[-1].append(row)
        return batches

    def pad(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Tokens [B, T] padded to the longest row and the mask [B, T], on the model's device."""
        device = next(self.model.parameters()).device
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.long)  # [B]
        width = max(map(len, rows), default=1)
        ids = [row + [self.model.pad_token_id] * (width - len(row)) for row in rows]
        ids = torch.tensor(ids, dtype=torch.long).view(len(rows), width)  # [B, T]
        mask = (torch.arange(width) < lengths[:, None]).long()  # [B, T]
        return ids.to(device), mask.to(device)


def load_scorer(path: Path, model: nn.Module, prefix: str, disk_prefix: str) -> Tokenizer:
    """Fill `model` with the tensors of a directory and return its tokenizer.

    Tensors of the encoder may carry `disk_prefix` ("bert.") or not; in the model they carry `prefix`. The pooler and
    the buffers of positions and types are no part of either network. InputError names the file that does not fit.
    """
    tensors, weights = read_weights(path)
    tensors = {
        prefix + name if name.startswith(("embeddings.", "encoder.")) else name: tensor
        for name, tensor in without_prefix(tensors, disk_prefix, weights).items()
        if name not in UNUSED
    }
    fill(model, tensors, weights)
    tokenizer = read_vocabulary(path, model.config.vocab_size)
    special = tokenizer.num_special_tokens_to_add(False)
    if special < 1:
        raise InputError(f"{tokenizer_files(path)[0]}: adds no special tokens; use one with a post-processor")
    if special >= model.max_tokens:
        raise InputError(f"{path / 'config.json'}: max_position_embeddings leaves no room for text; restore the file")
    return tokenizer


def save_scorer(path: Path, model: nn.Module, tokenizer: Tokenizer, dtype: torch.dtype, fields: dict) -> None:
    """Write the layout that `load` and transformers read: weights in `dtype`, `fields` added to config.json."""
    vocabulary = tokenizer.get_vocab()
    tokens = {role: name for role, names in SPECIAL_TOKENS.items() for name in names if name in vocabulary} | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": tokenizer.id_to_token(model.pad_token_id),
        "model_max_length": model.max_tokens,
    }
    write_tensors(path / "model.safetensors", {name: tensor.to(dtype) for name, tensor in model.state_dict().items()})
    write_text(path / "tokenizer.json", tokenizer.to_str(pretty=True))
    write_json(path / "tokenizer_config.json", tokens)
    fields = fields | {"torch_dtype": str(dtype).removeprefix("torch.")}
    write_json(path / "config.json", model.config.to_dict() | fields)


def read_config(path: Path, model_type: str) -> tuple[EncoderConfig, dict]:
    """The configuration of a directory and the raw JSON it came from."""
    raw = read_json(path / "config.json")
    return EncoderConfig.from_dict(raw, str(path / "config.json"), model_type), raw
