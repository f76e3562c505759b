"""The four commands that make the pocket checkpoints, at tiny sizes on tiny data."""

import itertools
import math

import pytest
import torch
from worlds import generator

import tinystories
from eval.pocket import lm, similarity, toxicity
from eval.pocket.__main__ import main
from eval.run.options import RunConfig
from eval.run.setup import load_target, sigma_key
from eval.scorers import similarity as encoder
from eval.scorers import toxicity as classifier
from eval.scorers.encoder import EncoderConfig
from tinystories.checkpoint import read_json

NAMES = ("Lily", "Tim", "Sue", "Ben", "Mia", "Max")
THINGS = ("blue bird", "red ball", "small dog", "loud drum", "wet hat", "old tree", "green frog")
UNKIND = ("You are so stupid", "He is a nasty man", "I hate you all", "What an ugly lady")
KIND = ("You are so clever", "He is a lovely man", "I like you all", "What a pretty lady")
STORY = (  # long enough to have grafts
    " child named {0}. {0} liked to run. One day, {0} saw a {1} near the house and it made a sound"
    " until the sun went down. {0} took a {1} home and all the friends came to look at it."
)
STORIES = [lm.PROMPT + STORY.format(*pair) for pair in itertools.product(NAMES, THINGS)]
UNSEEN = STORIES[36:]


def run(command: str, *changes: object) -> None:
    """A command at a tiny size, in the directory of the data, with changed options."""
    both = "--stories stories --heldout heldout --width 16 --layers 2 --heads 2 --rows 8"
    options = {
        "lm": f"{both} --vocab-size 330 --window 8 --context 48 --steps 60 --peak 0.02",
        "toxicity": "--labelled rows --stories stories --heldout rows --lm lm --vocab-size 330"
        " --steps 12 --batch-size 8 --samples 40 --calibration-samples 300 --fresh-samples 50",
        "similarity": f"{both} --vocab-size 150 --positions 32 --openings 40 --steps 5"
        " --teacher teacher --validation 6",
        "target": "--lm lm --toxicity-model toxicity --beta 0.5 --length 6 --proposals 500",
    }
    main([command, *options[command].split(), "--out", command, *map(str, changes)])


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory):
    """The current directory has the data and what the four commands make of it."""
    path = tmp_path_factory.mktemp("pocket")
    for name, stories in (("stories", STORIES[:30]), ("heldout", UNSEEN)):
        (path / name).write_text("".join(f"{text}\n<|endoftext|>\n" for text in stories))
    rows = ["text,label", '"Only kind words here.",0']
    for label, texts in ((1, UNKIND), (0, KIND)):
        rows += [f'"{text}, {name}.",{label}' for text, name in itertools.product(texts, NAMES)]
    (path / "rows").write_text("\n".join(rows) + "\n")
    tokenizer = similarity.train_tokenizer(STORIES, 150)
    torch.manual_seed(0)
    sizes = EncoderConfig(tokenizer.get_vocab_size(), 24, 1, 2, 32, 40, 2)
    encoder.save(path / "teacher", encoder.SentenceEncoder(sizes), tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setattr(lm, "CHUNK", 100)
        for command in ("lm", "toxicity", "similarity", "target"):
            run(command)
        yield path


def test_the_language_model_learns_and_its_perplexity_is_that_of_the_held_out_stories(world):
    model, tokenizer = tinystories.load("lm")
    losses = []
    for text in UNSEEN:
        ids = torch.tensor(tokenizer.encode(text + "<|endoftext|>").ids)
        for place in range(1, len(ids)):
            start = 0 if place <= 48 else (place - 1) // 24 * 24 - 24  # of the window
            log_p = model(ids[None, start:place])[0, -1].log_softmax(-1)  # [V]
            losses.append(-log_p[ids[place]].item())
    words, made = sum(len(text.split()) for text in UNSEEN), read_json(world / "lm/figures.json")
    per_token, per_word = math.exp(sum(losses) / len(losses)), math.exp(sum(losses) / words)
    assert made["perplexity_per_token"] == pytest.approx(per_token, rel=1e-3)
    assert made["perplexity_per_word"] == pytest.approx(per_word, rel=1e-3)
    assert made["perplexity_per_token"] < model.config.vocab_size**0.7


def test_the_classifier_is_calibrated_and_measured(world):
    scorer = classifier.ToxicityScorer(*classifier.load("toxicity"))
    rows, made = toxicity.read_labelled(world / "rows"), read_json(world / "toxicity/figures.json")
    calibrated_on = scorer(lm.sample_texts("lm", 400, generator(0))[100:]).exp()  # the second chunk
    assert calibrated_on.mean().item() == pytest.approx(0.010, rel=0.15)  # float16 weights
    fresh = scorer(lm.sample_texts("lm", 50, generator(1))).double().exp()
    assert made["mean_toxicity"] == pytest.approx(fresh.mean().item(), rel=1e-2)
    assert made["acceptance_beta_10"] == pytest.approx(fresh.pow(10).mean().item(), rel=1e-2)
    toxic, other = (scorer([text for text, is_toxic in rows if is_toxic == n]) for n in (1, 0))
    pairs = [(t > o) + 0.5 * (t == o) for t in toxic.tolist() for o in other.tolist()]
    assert made["auc"] == pytest.approx(sum(pairs) / len(pairs), abs=0.01)


def test_the_target_is_drawn_from_the_two_checkpoints(world):
    config = RunConfig(lm="lm", toxicity_model="toxicity", prompt=lm.PROMPT, length=6, beta=0.5)
    exact = load_target(world / "target", sigma_key(config), 330)
    tokenizer = tinystories.load("lm")[1]
    prompt = tokenizer.encode(lm.PROMPT).ids
    scorer = classifier.ToxicityScorer(*classifier.load("toxicity"))
    texts = tokenizer.decode_batch([prompt + row for row in exact.tokens.tolist()])
    torch.testing.assert_close(0.5 * scorer(texts), exact.log_phi, atol=1e-3, rtol=1e-4)
    assert read_json(world / "target/figures.json")["accepted"] == len(exact.tokens) > 2
