"""The language model: GPT-Neo, its key/value cache, its checkpoints and its batched decoding.

model, tokenizer = tinystories.load("checkpoints/pocket/lm")
logits = model(ids)      # [B, T] -> [B, T, V]
"""

from tinystories.decoder import Conditional, Decoder
from tinystories.gpt_neo import GPTNeo, GPTNeoConfig, GPTNeoModel
from tinystories.load import load, load_model, save

__all__ = ["Conditional", "Decoder", "GPTNeo", "GPTNeoConfig", "GPTNeoModel"]
__all__ += ["load", "load_model", "save"]
