"""How alike the samples are: the mean cosine of their sentence vectors (paper, section 3).

    e = sum_t m_t h_t / sum_t m_t,  e <- e / |e|     [B, D]   h the encoder's states, m 0 on padding
    e = h_0,  e <- e / |e|                                    where the checkpoint pools by CLS
    similarity = sum_{i != j} e_i . e_j / (N (N - 1)),  the sum is |sum_i e_i|^2 - sum_i |e_i|^2

The network is BERT as in all-MiniLM-L6-v2, trained for 256 tokens, at which texts are cut.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from eval.scorers.encoder import Encoder, EncoderConfig, load_scorer
from tinystories.checkpoint import POOLING, read_json
from tinystories.errors import InputError
from tinystories.gpt_neo import at_least_float32

MODES = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}  # in older files


class SentenceEncoder(Encoder):
    """BERT with pooling; `model(ids, mask)` gives unit vectors."""

    model_type = "bert"
    pooling = "mean"  # or "cls", the state of the first token

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.max_tokens = min(256, config.max_position_embeddings)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Unit vectors [B, D] of tokens [B, T]; mask [B, T] is 0 on padding."""
        hidden = at_least_float32(self.hidden(ids, mask))  # [B, T, D]
        if self.pooling == "cls":
            return F.normalize(hidden[:, 0].float(), dim=-1)
        weights = mask[..., None].to(hidden.dtype)  # [B, T, 1]
        mean = (hidden * weights).sum(1) / weights.sum(1)  # [B, D]
        return F.normalize(mean.float(), dim=-1)


def load(path: str | Path, device: str | torch.device = "cpu") -> tuple[SentenceEncoder, Tokenizer]:
    """Network (float32, eval mode) and tokenizer; InputError names what does not fit.

    A `1_Pooling/config.json` of sentence-transformers says how the network pools: by default, mean.
    """
    model, tokenizer = load_scorer(SentenceEncoder, path, device)
    file = Path(path) / POOLING
    raw = read_json(file) if file.exists() else {}
    older = [
        MODES.get(name, name) for name in raw if name.startswith("pooling_mode_") and raw[name]
    ]
    model.pooling = raw.get("pooling_mode") or "+".join(older) or "mean"
    if model.pooling not in ("cls", "mean"):
        fault = f"its pooling is {model.pooling}; use a sentence encoder with cls or mean"
        raise InputError(f"{file}: {fault}")
    return model, tokenizer


def mean_pairwise_cosine(vectors: Tensor) -> float:
    """Mean cosine over the pairs i != j of vectors [N, D], N > 1."""
    count = vectors.shape[0]
    unit = F.normalize(vectors.double(), dim=-1)  # [N, D]
    return float((unit.sum(0).square().sum() - unit.square().sum()) / (count * (count - 1)))
