"""How alike the samples are: the mean cosine of their sentence vectors (paper, section 3).

    e = sum_t m_t h_t / sum_t m_t,  e <- e / |e|     [B, D]   h the encoder's states, m 0 on padding
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
from tinystories.errors import InputError, listed
from tinystories.gpt_neo import at_least_float32


class SentenceEncoder(Encoder):
    """BERT with mean pooling; `model(ids, mask)` gives unit vectors."""

    model_type = "bert"

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.max_tokens = min(256, config.max_position_embeddings)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Unit vectors [B, D] of tokens [B, T]; mask [B, T] is 0 on padding."""
        hidden = at_least_float32(self.hidden(ids, mask))  # [B, T, D]
        weights = mask[..., None].to(hidden.dtype)  # [B, T, 1]
        mean = (hidden * weights).sum(1) / weights.sum(1)  # [B, D]
        return F.normalize(mean.float(), dim=-1)


def load(path: str | Path, device: str | torch.device = "cpu") -> tuple[SentenceEncoder, Tokenizer]:
    """Network (float32, eval mode) and tokenizer; InputError names what does not fit.

    A `1_Pooling/config.json` of sentence-transformers may say that the network pools by mean.
    """
    file = Path(path) / POOLING
    raw = read_json(file) if file.exists() else {}
    older = [name for name in raw if name.startswith("pooling_mode_") and raw[name]]
    mode = raw.get("pooling_mode") or listed(older) or "mean"
    if mode not in ("mean", "pooling_mode_mean_tokens"):
        raise InputError(
            f"{file}: its pooling is {mode}; use a sentence encoder that pools by mean"
        )
    return load_scorer(SentenceEncoder, path, device)


def mean_pairwise_cosine(vectors: Tensor) -> float:
    """Mean cosine over the pairs i != j of vectors [N, D], N > 1."""
    count = vectors.shape[0]
    unit = F.normalize(vectors.double(), dim=-1)  # [N, D]
    return float((unit.sum(0).square().sum() - unit.square().sum()) / (count * (count - 1)))
