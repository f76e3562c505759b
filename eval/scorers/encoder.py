"""The transformer encoder that BERT and RoBERTa share, and running it over many texts.

    x = LayerNorm(word[token] + position[place] + type[0])                            [B, T, D]
    x = LayerNorm(x + attention(x)),  x = LayerNorm(x + W_2 gelu(W_1 x))              per layer
    attention = softmax(q k^T / sqrt(D/H) + bias) v,  bias = 0 on text, lowest number on padding

Every token sees every other; gelu is the exact one (erf); the norm follows the sum. The modules
nest as the tensors of a Hugging Face checkpoint are named.

B batch, T tokens, D width, H heads.
"""

import dataclasses
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from tinystories import checkpoint
from tinystories.errors import InputError
from tinystories.gpt_neo import Linear, LinearGELU
from tinystories.tokenizer import read_tokenizer

UNUSED = {"embeddings.position_ids", "embeddings.token_type_ids"}
UNUSED |= {"pooler.dense.weight", "pooler.dense.bias"}  # tensors of no use to the two networks
PADDING = {"bert": 0, "roberta": 1}  # if config.json has no pad_token_id
MAX_TOKENS = 2**13  # of a batch: the widest activations of RoBERTa-base then take 100 MB
ENOUGH_TOKENS = 2**9  # from which on a batch is large enough for fast products
LONGER = 1.1  # times the shortest text of such a batch: what is longer begins a new one


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
    def from_dict(cls, raw: dict, model_type: str) -> "EncoderConfig":
        """Read a config.json; KeyError, TypeError or ValueError if it is another network."""
        known = {"model_type": model_type, "hidden_act": "gelu"}
        known |= {"position_embedding_type": "absolute"}
        defaults = {"layer_norm_eps": 1e-12, "pad_token_id": PADDING[model_type]}
        raw = known | defaults | {name: value for name, value in raw.items() if value is not None}
        if wrong := [name for name, value in known.items() if raw[name] != value]:
            raise ValueError(f"{wrong[0]} is {raw[wrong[0]]!r}, not {known[wrong[0]]}")
        names = [field.name for field in dataclasses.fields(cls)][:7]
        sizes = checkpoint.positive_integers(raw, names)
        epsilon, padding = float(raw["layer_norm_eps"]), raw["pad_token_id"]
        if sizes["hidden_size"] % sizes["num_attention_heads"]:
            raise ValueError("hidden_size must be a multiple of num_attention_heads")
        if not 0 < epsilon < 1:
            raise ValueError("layer_norm_eps must be between 0 and 1")
        if padding not in range(sizes["vocab_size"]):
            raise ValueError("pad_token_id must be a token")
        return cls(**sizes, layer_norm_eps=epsilon, pad_token_id=int(padding))

    def to_dict(self) -> dict:
        """The fields in the Hugging Face layout, without those in which BERT and RoBERTa differ."""
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return {"hidden_act": "gelu", **dropout, **dataclasses.asdict(self)}


class Embeddings(nn.Module):
    """Word, place and type of each token; the type is always 0."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        width = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, width)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, width)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps)

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
        self.query, self.key, self.value = (Linear(width, width) for _ in range(3))

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
    """LayerNorm(x + W y): how attention and the feed-forward network are added."""

    def __init__(self, inner: int, config: EncoderConfig):
        super().__init__()
        self.dense = Linear(inner, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x [B, T, D], y [B, T, inner] -> [B, T, D]"""
        return self.LayerNorm(x + self.dense(y))


class Layer(nn.Module):
    """Post-norm transformer layer."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        attention = {"self": SelfAttention(config), "output": Residual(width, config)}
        self.attention = nn.ModuleDict(attention)
        self.intermediate = nn.ModuleDict({"dense": LinearGELU(width, inner)})
        self.output = Residual(inner, config)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]"""
        x = self.attention["output"](x, self.attention["self"](x, bias))
        return self.output(x, self.intermediate["dense"](x))


class Encoder(nn.Module):
    """Hidden states of texts; the two networks built on it number the positions differently."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.encoder = nn.ModuleDict({"layer": layers})

    def hidden(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """States [B, T, D] of tokens [B, T] at positions [B, T] or [T]; mask 0 on padding."""
        x = self.embeddings(ids, positions)  # [B, T, D]
        lowest = torch.finfo(torch.float32).min
        bias = torch.zeros(mask.shape, device=x.device).masked_fill(mask == 0, lowest)  # [B, T]
        for layer in self.encoder["layer"]:
            x = layer(x, bias[:, None, None, :])
        return x


class Runner:
    """A network run over texts: tokenized, truncated, sorted by length, batched and padded.

    A batch holds at most `batch_size` texts and MAX_TOKENS tokens, padding included. Once it has
    ENOUGH_TOKENS, only texts of nearly the same length are added.
    `model` has `config`, `max_tokens`, and maps ids [B, T] and mask [B, T] to [B, ...].
    """

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, batch_size: int):
        if batch_size < 1:
            raise InputError(f"batch_size is {batch_size}; give at least 1")
        self.model, self.batch_size = model, batch_size
        self.tokenizer = Tokenizer.from_str(tokenizer.to_str())  # a copy: truncation is set on it
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(model.max_tokens)  # special tokens included

    def __call__(self, texts: list[str]) -> Tensor:
        """Results [N, ...] on the CPU in the order of the texts, or InputError for NaN."""
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts))]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        batches = self.batches([rows[i] for i in order])
        with torch.inference_mode():
            results = torch.cat([self.model(*self.pad(batch)) for batch in batches]).cpu()  # [N, .]
        results = results[torch.tensor(order, dtype=torch.long).argsort()]
        bad = (~torch.isfinite(results)).nonzero()
        if len(bad):
            fault = f"the score of {texts[int(bad[0, 0])][:60]!r} is NaN or infinite"
            raise InputError(f"{fault}; restore the checkpoint of the scorer")
        return results

    def batches(self, rows: list[list[int]]) -> list[list[list[int]]]:
        """Rows, sorted by length, in batches; no rows are one empty batch, whose shape is right."""
        batches: list[list[list[int]]] = [[]]
        for row in rows:
            last, size = batches[-1], len(batches[-1])
            is_full = size == self.batch_size or (size + 1) * len(row) > MAX_TOKENS
            has_enough = size > 0 and size * len(last[-1]) >= ENOUGH_TOKENS
            if size > 0 and (is_full or (has_enough and len(row) > LONGER * len(last[0]))):
                batches.append([])
            batches[-1].append(row)
        return batches

    def pad(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Tokens [B, T] padded to the longest row and the mask [B, T], on the model's device."""
        device = next(self.model.parameters()).device
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.long)  # [B]
        width = max(map(len, rows), default=1)
        ids = [row + [self.model.config.pad_token_id] * (width - len(row)) for row in rows]
        ids = torch.tensor(ids, dtype=torch.long).view(len(rows), width)  # [B, T]
        mask = (torch.arange(width) < lengths[:, None]).long()  # [B, T]
        return ids.to(device), mask.to(device)


def load_scorer(
    path: str | Path, device: str | torch.device, kind: type, model_type: str, prefix: str = ""
) -> tuple[nn.Module, Tokenizer]:
    """The network of class `kind` in a directory, in eval mode, and its tokenizer.

    On disk, tensors of the encoder may carry `model_type` as their prefix or none; in the network
    they carry `prefix`. InputError names the file that does not fit.
    """
    file, remedy = Path(path) / "config.json", "restore it or use another checkpoint"
    raw = checkpoint.read_json(file)
    with checkpoint.reading(file, f"not {model_type}", remedy), checkpoint.without_values():
        model = kind(EncoderConfig.from_dict(raw, model_type))
    tensors, source = checkpoint.read_weights(path)
    renamed = {}
    for name, tensor in checkpoint.without_prefix(tensors, f"{model_type}.", source).items():
        is_inner = name.startswith(("embeddings.", "encoder."))
        if name not in UNUSED:
            renamed[prefix + name if is_inner else name] = tensor
    checkpoint.fill(model, renamed, source)
    tokenizer = read_tokenizer(path, model.config.vocab_size)
    if not 0 < tokenizer.num_special_tokens_to_add(False) < model.max_tokens:
        fault = "must add special tokens to a text and leave room for it in max_position_embeddings"
        source = checkpoint.tokenizer_files(path)[0]
        raise InputError(f"{source}: {fault}; use the files of one checkpoint")
    return model.to(device).eval(), tokenizer


def save_scorer(
    path: str | Path, model: nn.Module, tokenizer: Tokenizer, dtype: torch.dtype, fields: dict
) -> None:
    """Write the layout that `load_scorer` and transformers read, `fields` added to config.json."""
    path = Path(path)
    options = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": tokenizer.id_to_token(model.config.pad_token_id),
        "model_max_length": model.max_tokens,
    }
    fields = fields | {"torch_dtype": str(dtype).removeprefix("torch.")}
    tensors = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    checkpoint.write_tensors(path / "model.safetensors", tensors)
    checkpoint.write_text(path / "tokenizer.json", tokenizer.to_str(pretty=True))
    checkpoint.write_json(path / "tokenizer_config.json", options)
    checkpoint.write_json(path / "config.json", model.config.to_dict() | fields)
