"""The makers of the pocket checkpoints, at tiny sizes on tiny data."""

import itertools
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy
from worlds import generator

import tinystories
from eval import pocket
from eval.config import RunOptions
from eval.scorers import encoder, similarity, toxicity
from eval.world import load_sigma
from tsmc import sample_proposal

NAMES = ("Lily", "Tim", "Sue", "Ben", "Mia", "Max")
THINGS = ("blue bird", "red ball", "small dog", "loud drum", "wet hat", "old tree", "green frog")
STORY = "Once upon a time, there was a child named {0}. One day, {0} took a {1} home to the others."
STORIES = [STORY.format(*pair) for pair in itertools.product(NAMES, THINGS)]
UNKIND = ("You are so stupid", "He is a nasty man", "I hate you all", "What an ugly lady")
KIND = ("You are so clever", "He is a lovely man", "I like you all", "What a pretty lady")
ENCODER = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 66}
LM = {"num_layers": 2, "num_heads": 2, "max_position_embeddings": 24}
LM |= {"attention_layers": ("global", "local")}
ROLES = [  # the networks, who reads and writes them, and their sizes
    ("lm", tinystories.load, tinystories.save, LM),
    ("toxicity", toxicity.load, encoder.save, ENCODER),
    ("similarity", similarity.load, encoder.save, ENCODER),
]


@pytest.fixture(scope="module", autouse=True)
def data(tmp_path_factory):
    """The directory DATA, which also holds tiny networks in place of the shipped ones."""
    path = tmp_path_factory.mktemp("pocket")
    stories = "".join(f"{one}\n<|endoftext|>\n" for one in STORIES[:32])
    (path / "tinystories.txt").write_text(stories)
    rows = ["text,label"]
    for label, texts in ((1, UNKIND), (0, KIND)):
        rows += [f'"{text}, {name}.",{label}' for text, name in itertools.product(texts, NAMES)]
    (path / "toxicity.csv").write_text("\n".join(rows) + "\n")
    torch.manual_seed(0)
    random.seed(0)
    for role, load, save, sizes in ROLES:
        model, tokenizer = load(pocket.POCKET / role)
        config = replace(model.config, hidden_size=16, intermediate_size=32, **sizes)
        save(path / role, type(model)(config), tokenizer)
    (path / "all-MiniLM-L6-v2").symlink_to(pocket.POCKET / "similarity")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pocket, "POCKET", path)
        patch.setattr(pocket, "RunOptions", partial(RunOptions, length=6))
        yield path


def test_the_language_model_learns(data):
    """In perplexity of held-out stories; a uniform one would have the size of the vocabulary."""
    pocket.make_lm(data, data / "new-lm", steps=60, rows=8)
    model, tokenizer = tinystories.load(data / "new-lm")
    ids = torch.tensor([tokenizer.encode(story).ids[:16] for story in STORIES[32:]])
    perplexity = cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:]).exp()
    assert 1 < perplexity < model.config.vocab_size / 4


def test_the_calibration_has_the_two_means():
    logits = 5 + 2 * torch.randn(20_000, generator=generator(0))
    a, b = pocket.calibration(logits)
    p_toxic = torch.sigmoid(-(a * logits.double() + b))
    assert a > 0 and p_toxic.mean().item() == pytest.approx(0.010, rel=1e-6)
    assert p_toxic.pow(10).mean().item() == pytest.approx(0.0006, rel=1e-6)


def test_the_classifier_is_calibrated_on_samples_and_tells_its_texts_apart(data):
    pocket.make_toxicity(data, data / "new-toxicity", steps=60, rows=16, count=300)
    score = toxicity.ToxicityScorer(*toxicity.load(data / "new-toxicity"))
    world = load_sigma(RunOptions(device="cpu", length=6))
    tokens = sample_proposal(world.base, None, 300, generator(0)).tokens
    p_toxic = score(world.potential.texts(tokens)).exp()
    assert p_toxic.mean().item() == pytest.approx(0.010, rel=0.15)  # float16 weights
    assert score(list(UNKIND)).mean() > score(list(KIND)).mean()


def test_the_encoder_takes_its_cosines_from_the_teacher(data):
    pocket.make_similarity(data, data / "new-similarity", steps=200, rows=16, count=100)
    cosines = []
    for name in ("all-MiniLM-L6-v2", "similarity", "new-similarity"):
        unit = encoder.Runner(*similarity.load(data / name))(STORIES)  # [N, D]
        cosines.append((unit @ unit.T)[torch.ones(42, 42).triu(1) > 0])  # [N (N - 1) / 2]
    _, before, after = torch.corrcoef(torch.stack(cosines))[0]
    assert after > before + 0.15
