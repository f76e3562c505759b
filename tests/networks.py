"""Random networks of transformers in the three roles, written to disk with shipped tokenizers."""

import shutil
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from eval import scorers
from eval.options import POCKET
from eval.scorers import Runner, SentenceEncoder, ToxicityClassifier, load_scorer
from tinystories.load import gpt_neo_from_json, load_network, read_json

LIMIT = 40  # tokens that the scorers have room for
LOAD = {  # networks and tokenizers of a directory
    "lm": lambda path: load_network(path, gpt_neo_from_json(read_json(path / "config.json"))),
    "toxicity": lambda path: load_scorer(ToxicityClassifier, str(path), "cpu"),
    "similarity": lambda path: load_scorer(SentenceEncoder, str(path), "cpu"),
}
AUTO = {
    "lm": transformers.AutoModelForCausalLM,
    "toxicity": transformers.AutoModelForSequenceClassification,
    "similarity": transformers.AutoModel,
}
KINDS = {"lm": "gpt_neo", "toxicity": "roberta", "similarity": "bert"}
BERT = {"num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40}
ROBERTA = {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "num_labels": 1}
SHAPES = {
    "lm": {"num_layers": 2, "num_heads": 3, "window_size": 4, "max_position_embeddings": LIMIT},
    "toxicity": BERT | ROBERTA | {"max_position_embeddings": LIMIT + 2},
    "similarity": BERT | {"max_position_embeddings": LIMIT},
}
SHAPES["lm"]["attention_types"] = [[["global", "local"], 1]]
PROMPT = torch.tensor([1, 0, 2])
TINY = {"vocab_size": 3, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"intermediate_size": 16, "num_key_value_heads": 1, "max_position_embeddings": 16}
TINY |= {"bos_token_id": 0, "eos_token_id": None}
TEXTS = [
    "Once upon a time, there was a small dog who liked to bark at the moon every night.",
    " The  Cat's hat, café 猫!\n a <mask>",
    "",
    "the moon " * 200,  # which is cut off
]


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


def tiny(kind: str, **changes) -> nn.Module:
    """A random causal language model of V = 3 tokens, float64."""
    config = transformers.AutoConfig.for_model(kind, **(TINY | changes))
    network = randomise(transformers.AutoModelForCausalLM.from_config(config), 1).double()
    network.get_output_embeddings().weight.data *= 0.4  # no token is very rare
    return network


def write(path: Path, role: str, network: nn.Module | None = None, **changes) -> nn.Module:
    """Save a network, by default a random one of a role, and the shipped tokenizer of the role."""
    if network is None:
        sizes = {"vocab_size": 5000, "hidden_size": 24} | SHAPES[role] | changes
        config = transformers.AutoConfig.for_model(KINDS[role], **sizes)
        network = randomise(AUTO[role].from_config(config), 0)
    network.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(POCKET / role / name, path)
    return network


def assert_close(actual: Tensor, wanted: Tensor) -> None:
    """Equal up to 2e-5 of the largest wanted value."""
    assert actual.shape == wanted.shape and actual.dtype == torch.float32
    assert (actual - wanted).abs().max() <= 2e-5 * wanted.abs().max()


@torch.no_grad()
def assert_same(role: str, path: Path, network: nn.Module) -> None:
    """What is loaded gives what a network of transformers gives: logits of tokens, or whatever a
    scorer makes of texts, in batches of any size."""
    model, tokenizer = LOAD[role](path)
    if role == "lm":
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(model.config.vocab_size, (3, 24), generator=generator)
        assert_close(model(ids), network(ids).logits)
        return
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    options = {"padding": True, "truncation": True, "max_length": LIMIT, "return_tensors": "pt"}
    inputs = theirs(TEXTS, return_token_type_ids=False, **options)
    output = network(**inputs)
    if role == "toxicity":
        wanted = output.logits[:, 0]
    else:
        rows = zip(output.last_hidden_state, inputs["attention_mask"].bool(), strict=True)
        wanted = F.normalize(torch.stack([row[kept].mean(0) for row, kept in rows]), dim=-1)
    assert wanted.std(0).max() > 0.04
    for size in (1, 2, 64):
        with mock.patch.object(scorers, "BATCH", size):
            run = Runner(model, tokenizer)
            assert_close(run(TEXTS), wanted)
            assert_close(run(TEXTS[::-1]), wanted.flip(0))
