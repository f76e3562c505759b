"""The four commands that make the pocket checkpoints, at tiny sizes on tiny data, and the parts that they are made of."""

import argparse
import hashlib
import itertools
import math
import random
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tinystories
from eval.pocket import common, lm, mixture, toxicity
from eval.pocket import similarity as pocket_similarity
from eval.pocket.__main__ import OPTIONS, main
from eval.run.target import load_target, target_key
from eval.scorers import similarity
from eval.scorers import toxicity as classifier
from eval.scorers.encoder import EncoderConfig, Runner
from tinystories.checkpoint import fingerprint, read_json
from tinystories.errors import InputError
from tsmc.rejection import log_mean_with_error

NAMES = ("Lily", "Tim", "Sue", "Ben", "Mia", "Max")
THINGS = ("blue bird", "red ball", "small dog", "loud drum", "wet hat", "old tree", "green frog")
UNKIND = ("You are so stupid", "He is a nasty man", "I hate you all", "What an ugly lady")
KIND = ("You are so clever", "He is a lovely man", "I like you all", "What a pretty lady")
COMMANDS = ("lm", "toxicity", "similarity", "target")


def story(name: str, thing: str) -> str:
    """A story long enough to have grafts."""
    middle = f"{name} liked to run. One day, {name} saw a {thing} near the house and it made a sound until the sun went down."
    return f"{common.PROMPT} child named {name}. {middle} {name} took a {thing} home and all the friends came to look at it."


STORIES = [story(name, thing) for name, thing in itertools.product(NAMES, THINGS)]


def write_stories(path: Path, stories: list[str]) -> Path:
    path.write_text("".join(f"{text}\n<|endoftext|>\n" for text in stories))
    return path


def write_rows(path: Path) -> Path:
    rows = [
        f'"{text}, {name}.",{label},{source}'
        for label, texts in ((1, UNKIND), (0, KIND))
        for source, (text, name) in zip("ab" * 12, itertools.product(texts, NAMES), strict=True)
    ]
    path.write_text("\n".join(["text,label,source", *rows, '"Only kind words here.",0,c']) + "\n")
    return path


def write_teacher(path: Path) -> str:
    """A random sentence encoder; the hash of its weights."""
    tokenizer = pocket_similarity.train_tokenizer(STORIES, 150)
    model = similarity.SentenceEncoder(EncoderConfig(tokenizer.get_vocab_size(), 24, 1, 2, 32, 40, 2))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    similarity.save(path, model, tokenizer)
    return hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A directory with all data, and with what the four commands make of it."""
    path, patch = tmp_path_factory.mktemp("pocket"), pytest.MonkeyPatch()
    patch.setattr(common, "CHUNK", 100)
    patch.setattr(pocket_similarity, "TEACHER_SHA256", write_teacher(path / "teacher"))
    write_stories(path / "stories.txt", STORIES[:30])
    write_stories(path / "heldout.txt", STORIES[30:])
    write_rows(path / "rows.csv")
    for command in COMMANDS:
        main(line_of(path, command))
    yield path
    patch.undo()


def line_of(path: Path, command: str, *changes: object) -> list[str]:
    """The arguments of a command at a tiny size."""
    stories = f"--stories {path}/stories.txt --heldout {path}/heldout.txt"
    rows = f"--labelled {path}/rows.csv --stories {path}/stories.txt --heldout {path}/rows.csv --lm {path}/lm"
    sizes = "--width 16 --layers 2 --heads 2"
    lines = {
        "lm": f"{stories} {sizes} --vocab-size 330 --window 8 --context 48 --rows 8 --steps 60 --peak 0.02 --samples 3",
        "toxicity": f"{rows} --vocab-size 330 --steps 12 --batch-size 8 --samples 40 --hard-samples 5"
        " --calibration-samples 300 --fresh-samples 50",
        "similarity": f"--teacher {path}/teacher {stories} {sizes} --validation 6 --vocab-size 150 --positions 32"
        " --openings 40 --rows 8 --steps 5",
        "target": f"--lm {path}/lm --toxicity-model {path}/toxicity --beta 0.5 --length 6 --proposals 500",
    }
    return [command, *lines[command].split(), "--out", str(path / command), *map(str, changes)]


def card(path: Path, command: str) -> str:
    return (path / command / "README.md").read_text(encoding="utf-8")


def ended_with(capsys, arguments: list[str]) -> str:
    """The one line that bad input ends with."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    lines = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2 and lines[-1].startswith("python -m eval.pocket") and ": error: " in lines[-1]
    return lines[-1]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_leaves_a_card_with_its_own_line_and_no_gap(world, command):
    text = card(world, command)
    assert " ".join(["python -m eval.pocket", *line_of(world, command)]) in text
    assert not re.search(r"\{\w+[.:}]", text)
    if command != "target":
        assert fingerprint(world / command) in text


@pytest.mark.parametrize("command", COMMANDS)
def test_measuring_alone_writes_the_same_card_and_touches_nothing_else(world, command):
    before = {path: path.read_bytes() for path in (world / command).iterdir()}
    (world / command / "README.md").unlink()
    main([*line_of(world, command), "--card-only"])
    assert {path: path.read_bytes() for path in (world / command).iterdir()} == before


@pytest.mark.parametrize("command", ["lm", "similarity", "target"])
def test_a_seed_gives_one_checkpoint(world, tmp_path, command):
    name = "samples.safetensors" if command == "target" else "model.safetensors"
    for seed in (0, 1):
        main([*line_of(world, command), "--out", str(tmp_path / str(seed)), "--seed", str(seed)])
    made = [(path / name).read_bytes() for path in (world / command, tmp_path / "0", tmp_path / "1")]
    assert made[0] == made[1] != made[2]


def test_perplexity_of_the_card_is_that_of_the_held_out_stories(world):
    model, tokenizer = tinystories.load(world / "lm")
    end, size, total, tokens = tokenizer.token_to_id("<|endoftext|>"), 48, 0.0, 0
    for text in STORIES[30:]:
        ids = torch.tensor([*tokenizer.encode(text).ids, end])
        for place in range(1, len(ids)):
            start = 0 if place <= size else (place - 1) // 24 * 24 - 24  # of the window that scores this token
            logits = model(ids[None, start:place])[0, -1]
            total -= logits.log_softmax(-1)[ids[place]].item()
            tokens += 1
    words = sum(len(text.split()) for text in STORIES[30:])
    shown = [float(figure) for figure in re.findall(r"perplexity per \w+ \| (\S+) \|", card(world, "lm"))]
    assert shown == pytest.approx([math.exp(total / tokens), math.exp(total / words)], rel=1e-3, abs=0.005)


def test_the_language_model_learns(world):
    model, tokenizer = tinystories.load(world / "lm")
    ids = tokenizer.encode(STORIES[-1]).ids
    assert model.config.attention_layers == ("global", "local")
    assert lm.total_nll(model, ids) / (len(ids) - 1) < 0.7 * math.log(model.config.vocab_size)


def test_calibration_meets_both_means():
    logits = 3 + 2 * torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    scale, bias = toxicity.calibration(logits)
    p_toxic = torch.sigmoid(-(scale * logits.double() + bias))
    assert p_toxic.mean().item() == pytest.approx(0.010, rel=1e-6)
    assert p_toxic.pow(10).mean().item() == pytest.approx(0.0006, rel=1e-6)


def test_the_classifier_is_calibrated_on_samples_of_the_language_model(world):
    texts = common.sample_texts(world / "lm", 400, torch.Generator().manual_seed(0))[100:]  # behind those trained on
    scorer = classifier.ToxicityScorer(*classifier.load(world / "toxicity"))
    assert scorer(texts).exp().mean().item() == pytest.approx(0.010, rel=0.15)  # weights are rounded to float16


def test_calibration_is_folded_into_the_last_layer(world, tmp_path, monkeypatch):
    made = []
    for name, (scale, bias) in {"plain": (1.0, 0.0), "folded": (30.0, 1.5)}.items():
        monkeypatch.setattr(toxicity, "calibration", lambda logits, chosen=(scale, bias): chosen)
        main(line_of(world, "toxicity", "--out", tmp_path / name))
        made.append(classifier.load(tmp_path / name)[0].classifier.out_proj)
        assert read_json(tmp_path / name / "config.json")["calibration"] == {"scale": scale, "bias": bias}
    plain, folded = made
    torch.testing.assert_close(folded.weight, 30 * plain.weight, atol=1e-3, rtol=2e-3)
    torch.testing.assert_close(folded.bias, 30 * plain.bias + 1.5, atol=1e-3, rtol=2e-3)


def test_the_harmless_samples_that_seem_most_toxic_become_hard(world, monkeypatch):
    model, tokenizer = classifier.load(world / "toxicity")
    run, found = Runner(model, tokenizer, 8), []

    def texts(rng, labelled, stories, samples, hard):
        found.append(hard)
        return itertools.repeat(("a text", 0))

    monkeypatch.setattr(toxicity, "draw_texts", texts)
    monkeypatch.setattr(common, "fit", lambda model, args, loss_of, decay_all: [loss_of(step) for step in (0, 6, 7)])
    args = argparse.Namespace(steps=9, seed=0, batch_size=2, hard_samples=4, tokens=9, word_dropout=0.0)
    toxicity.train(run, [], STORIES, [*STORIES, "You are stupid."], args)
    assert found[0] == [STORIES[i] for i in run(STORIES).argsort()[:4].tolist()]


def test_the_card_judges_the_regime_by_samples_of_the_next_seed(world):
    fresh = common.sample_texts(world / "lm", 50, torch.Generator().manual_seed(1))
    mean = classifier.ToxicityScorer(*classifier.load(world / "toxicity"))(fresh).exp().mean().item()
    shown = re.search(r"acceptance at beta 1 \| (\S+) \|", card(world, "toxicity"))
    assert float(shown[1]) == pytest.approx(mean, abs=2e-5) and "(seed 1, not" in card(world, "toxicity")


def test_area_under_the_curve_counts_pairs():
    labels, scores = [1, 0, 1, 0, 0], [0.5, 0.5, 2.0, 0.1, 3.0]
    rows = [mixture.Labelled("", label, "a" if place else "b") for place, label in enumerate(labels)]
    pairs = [(p > n) + 0.5 * (p == n) for p, q in zip(scores, labels, strict=True) if q for n in (0.5, 0.1, 3.0)]
    table = toxicity.source_table(torch.tensor(scores), rows, 0.4)
    assert table.splitlines()[1] == "| b | 1 | 1 | - | 1.000 |"
    assert table.splitlines()[2] == f"| all | 5 | 2 | {sum(pairs) / len(pairs):.3f} | 0.600 |"


def draw(count: int, hard: list[str]) -> list[tuple[str, float]]:
    rows = [mixture.Labelled(f"toxic{n} words", 1, "a") for n in range(3)]
    rows += [mixture.Labelled(f"clean{n} words", 0, "a") for n in range(3)]
    stream = mixture.draw_texts(
        random.Random(0), rows, mixture.harmless(STORIES), ["a sample of eight words or so, yes"], hard
    )
    return list(itertools.islice(stream, count))


def test_the_mixture_labels_what_it_makes():
    drawn = draw(3000, [])
    for text, chance in drawn:
        assert 0 <= chance <= 1
        if "toxic" in text or "clean" in text:
            assert chance == ("toxic" in text)
        else:
            assert (chance > 0) == bool(mixture.FLAGGED.search(text))
    kinds = [sum(name in text for text, _ in drawn) / 3000 for name in ("toxic", "clean")]
    assert kinds == pytest.approx([0.24, 0.24], abs=0.03)


def test_hard_samples_come_up_once_there_are_some():
    hard = [text for text, _ in draw(1000, ["hard hard hard hard hard hard"]) if text.startswith("hard")]
    assert len(hard) / 1000 == pytest.approx(0.2 * 0.6, abs=0.03) and not any(
        "hard" in text for text, _ in draw(500, [])
    )


def test_texts_with_unkind_or_unclear_words_are_not_called_harmless():
    texts = ["a nice day", "a NASTY day", "they were evil.", "meaning well", "fine " * 60 + "stupid"]
    assert mixture.harmless(texts) == [texts[0], texts[3], texts[4]]


def test_the_same_stories_give_the_same_tokenizer_and_texts():
    assert (
        pocket_similarity.train_tokenizer(STORIES, 150).to_str()
        == pocket_similarity.train_tokenizer(STORIES, 150).to_str()
    )
    texts, again, other = (
        pocket_similarity.draw_openings([*STORIES, "Hello! " + STORIES[0]], 12, torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    )
    assert texts == again != other
    for index, text in enumerate(texts):
        prompted, words = text.startswith(common.PROMPT + " "), len(text.split())
        assert prompted and 20 <= words <= 30 if index % 4 else 8 <= words <= 40
        inside = text.removeprefix(common.PROMPT + " ") if index % 4 > 1 else text
        assert any(inside in whole for whole in [*STORIES, "Hello! " + STORIES[0]])


def test_training_brings_the_cosines_to_the_targets():
    generator = torch.Generator().manual_seed(0)
    tokenizer = pocket_similarity.train_tokenizer(STORIES, 150)
    model = similarity.SentenceEncoder(EncoderConfig(tokenizer.get_vocab_size(), 16, 1, 2, 32, 40, 2))
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    texts = [*THINGS, *NAMES]
    targets = F.normalize(torch.randn(len(texts), 5, generator=generator), dim=-1)

    def error() -> float:
        vectors = Runner(model, tokenizer, 8)(texts)
        return (vectors @ vectors.T - targets @ targets.T).square().mean().item()

    before = error()
    args = argparse.Namespace(weight_decay=0.01, peak=0.03, rows=12, steps=100)
    pocket_similarity.train(Runner(model, tokenizer, 12), texts, targets, args, generator)
    assert error() < 0.3 * before


def test_the_student_starts_with_the_leading_directions_of_the_teachers_words(world):
    tokenizer = pocket_similarity.train_tokenizer(STORIES, 120)
    student = Runner(
        similarity.SentenceEncoder(EncoderConfig(tokenizer.get_vocab_size(), 8, 1, 2, 32, 40, 2)), tokenizer, 8
    )
    teacher = pocket_similarity.load_teacher(world / "teacher")
    pocket_similarity.initialise(student, teacher, torch.Generator().manual_seed(0))
    names = [tokenizer.id_to_token(index).removeprefix("##") for index in range(tokenizer.get_vocab_size())]
    table = teacher.model.embeddings.word_embeddings.weight
    pieces = [teacher.tokenizer.encode(name, add_special_tokens=False).ids for name in names]
    words = torch.stack([table[ids].mean(0) for ids in pieces]).detach()
    u, s, _ = torch.linalg.svd(words - words.mean(0), full_matrices=False)
    best = (u[:, :8] * s[:8].square()) @ u[:, :8].T  # products of the words, as well as 8 directions can give them
    mine = student.model.embeddings.word_embeddings.weight.detach()
    torch.testing.assert_close(mine @ mine.T / mine.square().sum(), best / s[:8].square().sum(), atol=1e-4, rtol=1e-3)


def test_the_sentence_encoder_reads_texts(world):
    vectors = similarity.SimilarityScorer(*similarity.load(world / "similarity"))(STORIES)
    assert vectors.shape == (len(STORIES), 16) and vectors.isfinite().all()
    assert "| validation, all | 6 | 15 | " in card(world, "similarity")
    assert "| held-out, those with the prompt | 12 | 66 | " in card(world, "similarity")


def test_the_target_is_drawn_from_the_two_checkpoints(world):
    key = target_key(world / "lm", world / "toxicity", common.PROMPT, 6, 0.5)
    exact = load_target(world / "target", key)
    model, tokenizer = tinystories.load(world / "lm")
    prompt = tokenizer.encode(common.PROMPT).ids
    texts = tokenizer.decode_batch([prompt + row for row in exact.tokens.tolist()])
    scorer = classifier.ToxicityScorer(*classifier.load(world / "toxicity"))
    torch.testing.assert_close(0.5 * scorer(texts), exact.log_phi, atol=1e-3, rtol=1e-4)
    conditional = tinystories.Conditional(model, torch.tensor(prompt), 6)
    others = torch.cat([common.sample_model(conditional, common.OneStream(1000, torch.Generator().manual_seed(9)))])
    log_z, error = log_mean_with_error(0.5 * scorer(tokenizer.decode_batch([prompt + row for row in others.tolist()])))
    assert abs(exact.log_z - log_z) < 4 * math.hypot(error, exact.log_z_std_error)


def test_the_first_samples_do_not_depend_on_how_many_are_drawn(world):
    few, many = (common.sample_texts(world / "lm", count, torch.Generator().manual_seed(3)) for count in (5, 300))
    assert few == many[:5]


def test_the_learning_rate_warms_up_and_decays():
    rates = [common.learning_rate(step, 300, 2.0) for step in range(300)]
    assert rates[0] == pytest.approx(0.02) and rates[99] == rates[100] == 2.0
    assert rates[200] == pytest.approx(2.0 * (0.05 + 0.95 / 2)) and rates[-1] == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize("decay_all", [False, True])
def test_weight_decay_is_of_matrices_or_of_all(decay_all):
    layer = torch.nn.Linear(2, 2)
    weight, bias = layer.weight.clone(), layer.bias.clone()
    args = argparse.Namespace(steps=1, peak=1.0, weight_decay=0.5)
    common.fit(layer, args, lambda step: 0 * (layer.weight.sum() + layer.bias.sum()), decay_all)
    torch.testing.assert_close(layer.weight, weight * (1 - 0.01 * 0.5))  # the first rate is a hundredth of the peak
    torch.testing.assert_close(layer.bias, bias * (1 - 0.01 * 0.5) if decay_all else bias)


@pytest.mark.parametrize(
    ("command", "changes", "words"),
    [
        ("lm", ("--width", 15), "--width 15 is no multiple of --heads 2"),
        ("lm", ("--steps", 0), "--steps is 0; give at least 1"),
        ("lm", ("--peak", "nan"), "--peak is nan"),
        ("lm", ("--heldout", "nowhere"), "nowhere: no such file"),
        ("lm", ("--out", "stories.txt"), "stories.txt"),
        ("lm", ("--context", 100_000), "--context 100000"),
        ("lm", ("--steps", "many"), "--steps"),
        ("toxicity", ("--heldout", "stories.txt", "--card-only"), "not a text,label,source file"),
        ("toxicity", ("--lm", "nowhere"), "nowhere"),
        ("similarity", ("--teacher", "lm"), "sha256 differs"),
        ("similarity", ("--validation", 30), "--stories: none opens with"),
        ("target", ("--beta", 2, "--card-only"), "drawn with other options"),
        ("target", ("--proposals", 2), "raise --proposals"),
    ],
)
def test_bad_input_ends_in_one_line(world, capsys, tmp_path, command, changes, words):
    places = {"stories.txt": world / "stories.txt", "lm": world / "lm", "nowhere": tmp_path / "nowhere"}
    out = world / command if "--card-only" in changes else tmp_path / "out"
    changes = [places.get(change, change) for change in changes]
    assert words in ended_with(capsys, line_of(world, command, "--out", out, *changes))
    assert not (tmp_path / "out" / "README.md").exists()


def test_a_command_line_without_its_files_ends_in_one_line(capsys):
    assert "--stories" in ended_with(capsys, ["lm"])
    assert "WHAT" in ended_with(capsys, [])


def test_empty_or_broken_files_are_named(tmp_path):
    (tmp_path / "empty.txt").write_text("\n<|endoftext|>\n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xff")
    for name in ("empty.txt", "bytes.txt"):
        with pytest.raises(InputError, match=name):
            common.read_stories(tmp_path / name)
    for text in ("", "text,label,source\n", "text,label\nhello,1\n", "text,label,source\nhello,one,a\n"):
        (tmp_path / "rows.csv").write_text(text)
        with pytest.raises(InputError, match=r"rows\.csv"):
            mixture.read_labelled(tmp_path / "rows.csv")


def test_the_defaults_are_those_of_the_shipped_cards():
    shipped = Path(__file__).parent.parent / "checkpoints" / "pocket"
    for command in COMMANDS:
        text = (shipped / command / "README.md").read_text(encoding="utf-8")
        assert f"python -m eval.pocket {command}" in text and "eval.card" not in text and "eval.train" not in text
    steps = {command: OPTIONS[command]["steps"]["default"] for command in COMMANDS[:3]}
    assert steps == {"lm": 8000, "toxicity": 2000, "similarity": 1500}
