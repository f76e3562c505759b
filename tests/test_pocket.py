"""The makers of the pocket networks: a few steps of each, at tiny sizes on tiny data."""

import itertools
import random
from dataclasses import replace
from functools import partial

import torch
from networks import LOAD

import tinystories
from checkpoints.pocket import make
from eval.scorers import save_scorer

STORY = "Once upon a time, there was a child named {0}. One day, {0} took a {1} home to the others."
PAIRS = itertools.product(("Lily", "Tim", "Sue", "Ben"), ("blue bird", "red ball", "wet hat"))
STORIES = [STORY.format(*pair) for pair in PAIRS]
ENCODER = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 66}
SHAPES = {"toxicity": ENCODER, "similarity": ENCODER, "lm": {"max_position_embeddings": 24}}
SHAPES["lm"] |= {"num_layers": 2, "num_heads": 2, "attention_layers": ("global", "local")}


def test_each_network_is_trained_and_loads(tmp_path, monkeypatch):
    """The directory DATA also holds tiny networks in place of the shipped ones."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "tinystories.txt").write_text("".join(f"{one}\n<|endoftext|>\n" for one in STORIES))
    rows = ["text,label", "You are so stupid,1", "He is a nasty man,1", "You are so clever,0"]
    (data / "toxicity.csv").write_text("\n".join([*rows, ""]))
    (data / "all-MiniLM-L6-v2").symlink_to(make.POCKET / "similarity")
    torch.manual_seed(0)
    random.seed(0)
    for role, load in LOAD.items():
        model, tokenizer = load(make.POCKET / role)
        shape = {"hidden_size": 16, "intermediate_size": 32} | SHAPES[role]
        save = tinystories.save if role == "lm" else save_scorer
        save(data / role, type(model)(replace(model.config, **shape)), tokenizer)
    monkeypatch.setattr(make, "POCKET", data)
    monkeypatch.setattr(make, "RunOptions", partial(make.RunOptions, length=6))
    for role in ("toxicity", "similarity"):
        make.MAKE[role](data, tmp_path / role, steps=20, rows=8, count=200)
        before, after = (LOAD[role](path / role)[0].state_dict() for path in (data, tmp_path))
        assert not any(torch.equal(before[name], after[name]) for name in after)
    make.make_lm(data, tmp_path / "lm", steps=60, rows=8)
    model, tokenizer = tinystories.load(tmp_path / "lm")
    ids = torch.tensor([tokenizer.encode(story).ids[:16] for story in STORIES])
    loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:])
    assert 1 < loss.exp() < model.config.vocab_size / 4, "perplexity"
