"""Potentials and prefix parts: ready ones, products, one's own, what can be wrong with them."""

import itertools
import math
import os
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch
import twist.guards
from tokenizers import Tokenizer, decoders, models
from twist.factors import ended, keyword, load_factors, without
from twist.guards import STATE, as_log_phi, call_users
from worlds import generator, letters, tiny_conditional

from distill import sample
from eval.options import POCKET
from twist import TextPotential
from twist.potential import check_potential

INF = math.inf
ROOT = Path(__file__).resolve().parents[1]
PROMPT = torch.tensor([1, 2])
MEANING = [
    ("keyword:dragon", " red Dragon-fly.", 0.0),
    ("keyword:dragon", " dragons snapdragon", -INF),
    ("keyword~0.5:cat", " dog", -0.5),
    ("regex~2:a:b~c", " a:b", -2.0),
    ("without:dog", " a Dog", -INF),
]
REFUSED = [  # what is not understood, a part of what is said
    ("toxcity", "there is no 'toxcity' (did you mean 'toxicity'?); give toxicity, nontoxicity"),
    ("toxicity~2", "the strength after ~; give"),
    ("without:\t", "a word is missing"),
    ("keyword~0:cat", "the strength after ~"),
    ("regex:(", "not a regular expression"),
    ("x.py", "there is no file"),
    ("ended:dog", "too many"),
    ("tests/worlds.py", "no function is named; give FILE.py:NAME, of ["),
    ("tests/worlds.py:phi", "'phi' is no function; give FILE.py:NAME, of ["),
]


def test_what_the_option_means_and_what_is_not_understood_is_one_line():
    for spec, text, log_phi in MEANING:
        factor = load_factors((spec,))[spec]
        assert list(factor([text])) == [log_phi] and factor.reads == "continuations"
    for spec, part in REFUSED:
        with pytest.raises(ValueError, match=re.escape(part)) as refused:
            load_factors((spec,))
        assert str(refused.value).startswith(f"--potential {spec}: ")
    for factor in (keyword, without):
        with pytest.raises(ValueError, match="a word is blank; give one"):
            factor(" ")


def test_a_word_is_spelled_by_whatever_tokens_p_may_write():
    """The tokenizer writes " submarine" in one way, p in several."""
    tokenizer = Tokenizer.from_file(str(POCKET / "lm" / "tokenizer.json"))
    encode = lambda text: tokenizer.encode(text).ids  # noqa: E731
    phi = TextPotential([keyword("submarine")], tokenizer.decode_batch, PROMPT, encode=encode)
    spellings = phi.spellings(["submarine"])
    for pieces in (["\u0120sub", "m", "ar", "ine"], ["\u0120sub", "ma", "r", "ine"]):
        assert tuple(map(tokenizer.token_to_id, pieces)) in spellings
    assert {tokenizer.decode(row).strip().lower() for row in spellings} == {"submarine"}


def characters(rows):
    return ["".join(map(chr, row)) for row in rows]


def test_a_product_has_the_hints_of_its_factors_and_the_sum_of_their_prefix_parts():
    def length(texts):
        return [-float(len(text)) for text in texts]

    def other(texts):
        return [0.0] * len(texts)

    length.prefix, other.hints = length, ["submarine", "boat"]
    factors = [length, keyword("red cat"), without("dog"), length, other]
    phi = TextPotential(factors, characters, PROMPT, encode=lambda text: [*map(ord, text)])
    assert phi.log_prefix(torch.tensor([[2, 3], [2, 3]])).tolist() == [-8.0] * 2
    cat, vessel = [["".join(map(chr, hint)) for hint in some] for some in phi.hints]
    forms = ["red cat", "Red cat", "Red Cat", "RED CAT"]  # alone behind a quotation mark
    assert cat == [f" {form}" for form in forms] + forms
    assert {" submarine", " boat", "Boat", "SUBMARINE"} < set(vessel) and len(vessel) == 12
    assert phi.spellings(["red cat"]) == phi.spellings(["RED CAT"]) != phi.spellings(["rEd cat"])
    plain = TextPotential([other], letters, PROMPT)
    assert plain.log_prefix is None and plain.hints == []


GOOD = [[0, -1.5], (Fraction(0), -1.5), [torch.tensor(0.0), numpy.float16(-1.5)]]
GOOD += [numpy.array([0, -1.5], dtype="float32"), numpy.array([0, -1.5], dtype=object)]
GOOD += [torch.tensor([0, -1.5], dtype=torch.bfloat16, requires_grad=True)]
WRONG = [[-5.0, True], [torch.tensor(True), 0.0], [0.0, numpy.True_], numpy.array([True, False])]
WRONG += [numpy.array([True, -5.0], dtype=object), torch.tensor([0, 1j]), ["0", "0"], None, 0.0]
WRONG += [torch.zeros(2, 1), [0.0], {0: 0.0, 1: 0.0}, [math.nan, 0.0], torch.tensor([0.0, INF])]


def test_numbers_may_come_in_any_form_but_truth_values_and_complex_numbers_are_none():
    for values in GOOD:
        assert as_log_phi(values, ["a", "b"]).tolist() == [0.0, -1.5]
    for values in WRONG:
        with pytest.raises(ValueError, match=r"^the potential (is|returned) .*; return "):
            as_log_phi(values, ["a", "b"])


def complaint(factor) -> str:
    """What is said of a function of texts, or of FILE.py:NAME, where something is wrong with it."""
    try:
        factor = load_factors((factor,))[factor] if isinstance(factor, str) else factor
        potential = TextPotential([factor], letters, PROMPT)
        check_potential(tiny_conditional(1), potential, generator(0))
    except ValueError as error:
        return str(error)
    return ""


PREFIX = "def f(texts): return [0.0] * len(texts)\nf.prefix = lambda texts: [{}] * len(texts)"
FAULTS = [  # what a user's file holds, a part of what is said
    ("def f(texts): return [float('nan')] * len(texts)", "nan for 'bc"),
    ("def f(texts): return [10**400] * len(texts)", "return one number below infinity"),
    ("f = 3", "'f' is no function"),
    ("def f(texts):\n    import sys; sys.exit()", "line 2: SystemExit"),
    ("x = 0\nx = = 1", "failed (SyntaxError: invalid syntax (my.py, line 2))"),
    ("def f(texts):\n    import json\n    return json.loads('{')", "line 3: JSONDecodeError"),
    ("def f(texts): pass\nf.hints = 'cat'", "has hints 'cat'; give a list"),
    ("def f(texts): pass\nf.hints = {'cat'}", "has hints {'cat'}; give a list"),
    ("def f(texts): pass\nf.hints = None", "has hints None; give a list"),
    ("def f(texts): pass\nf.reads = 'words'", "give one of texts, continuations"),
    (PREFIX.format("float('-inf')"), "is -inf; let it be a number"),
    (PREFIX.format("-float(len(texts))"), "in one call, -1 in another; it must"),
    (PREFIX.format("float('nan')"), ".prefix is nan for 'bc"),
    ("def f(texts):\n    raise RuntimeError('no memory of it')", "RuntimeError: no memory of it"),
    ("import nosuch", "No module named 'nosuch'); install what it imports"),
]


@pytest.mark.parametrize(("content", "part"), FAULTS)
def test_what_is_wrong_with_a_users_file_is_one_line(tmp_path, content, part):
    """With the function or with its prefix part."""
    path = tmp_path / "my.py"
    path.write_text(content)
    message = complaint(f"{path}:f")
    assert message.startswith(f"--potential {path}:f") and part in message
    assert message.isprintable() and ";" in message


def test_what_is_lacking_for_a_potential_is_named(monkeypatch):
    """A package, which its file knows; and memory, which the command knows how to save."""
    monkeypatch.setitem(sys.modules, "vader", None)
    assert "pip install nltk-vader-sentiment==" in complaint("docs/sad.py:log_phi")
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA")):
        with pytest.raises(type(error)):
            call_users("phi", mock.Mock(side_effect=error))
    with pytest.raises(RuntimeError, match="allocate"):
        call_users("phi", torch.empty, 2**55)


SETTER = """import os, sys, torch
torch.set_grad_enabled(False)
torch.set_default_dtype(torch.float64)
os.chdir("/")
sys.stderr = None
def f(texts):
    assert torch.tensor(1.0).dtype == torch.float64 and os.getcwd() == "/"
    torch.set_num_threads(3)
    return [0.0] * len(texts)
"""


def test_a_users_code_keeps_its_own_state_of_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr(twist.guards, "USERS", {})
    path, streams = tmp_path / "my.py", (sys.stdout, sys.stderr)
    path.write_text(SETTER)
    state = [read() for read, _ in STATE]
    assert complaint(f"{path}:f") == complaint(f"{path}:f") == ""
    assert [read() for read, _ in STATE] == state and (sys.stdout, sys.stderr) == streams
    theirs = twist.guards.USERS
    assert torch.is_grad_enabled() and theirs == {0: "/", 1: torch.float64, 3: 3}


MIXED = """import os, subprocess, sys
from eval.command import one_line_errors
with one_line_errors("program"):
    os.write(1, b"raw\\n")
    subprocess.run(["echo", "child"])
    print("result \u4e2d")
    sys.stdout = sys.stderr  # as threads leave it that redirect it at the same time
print("later")
"""


def test_only_what_python_prints_is_on_standard_output():
    given = {"cwd": ROOT, "capture_output": True, "env": os.environ | {"LC_ALL": "C.UTF-8"}}
    ended = subprocess.run([sys.executable, "-c", MIXED], **given)
    assert ended.stdout.decode() == "result \u4e2d\nlater\n"
    assert ended.stderr.decode() == "raw\nchild\n"


def sums(texts: list[str]) -> torch.Tensor:
    """Numbers of texts, from -32 to -8."""
    return -torch.tensor([float(sum(map(ord, text[2:])) - 380) for text in texts]).double()


def test_what_depends_on_the_other_texts_is_refused_and_half_precision_is_not():
    assert "it must depend on" in complaint(lambda texts: sums(texts).log_softmax(0))
    assert "it must depend on" in complaint(lambda texts: sums(texts) - len(texts) ** 2)
    noise = generator(0)
    drawn = lambda texts: sums(texts) + 0.3 * torch.randn(len(texts), generator=noise)  # noqa: E731
    assert "in another; it must depend on its text alone" in complaint(drawn)
    dead = lambda texts: [-INF if "a" in text[2:] else 0.0 for text in texts]  # noqa: E731
    assert complaint(sums) == complaint(dead) == ""

    def rounded(texts):
        """As rounding to bfloat16 in a network, whose products depend on the batch."""
        error = torch.randn(len(texts), generator=generator(len(texts))).clamp(-1, 1)
        return sums(texts) * (1 + 0.02 * error)

    assert complaint(rounded) == ""
    for prompt, end in ((PROMPT[:1], -1), (PROMPT, 2)):
        with pytest.raises(ValueError, match="differ in prompt or end"):
            sample(tiny_conditional(1), TextPotential([dead], letters, prompt, end))


@pytest.mark.parametrize("strength", [INF, 2.0])
def test_f_is_never_below_phi_of_a_continuation(strength):
    factor = without("dog", strength)
    pieces = [" dog", "gy", ".", '"', " a b"]
    texts = ["".join(text) for text in itertools.product(pieces, repeat=4)]
    phi = dict(zip(texts, factor(texts), strict=True))
    for begun in {"".join(some) for t in (1, 2, 3) for some in itertools.product(pieces, repeat=t)}:
        (log_f,) = factor.prefix([begun])
        assert log_f >= max(value for text, value in phi.items() if text.startswith(begun)), begun


def test_the_potential_reads_whole_characters_before_the_end_and_ended_asks_for_it():
    words = ["Once", "<end>", " a", " b\ufffd", "<pad>"]
    decode = lambda rows: ["".join(words[t] for t in row) for row in rows]  # noqa: E731
    phi = TextPotential([ended(2.0)], decode, torch.tensor([0]), (1, 4))
    rows = torch.tensor([[2, 1, 1], [1, 1, 1], [4, 4, 4], [2, 3, 2], [2, 2, 3], [2, 4, 4]])
    found = phi.texts(rows)
    assert found == ["Once a", "Once", "Once", "Once a b\ufffd a", "Once a a b", "Once a"]
    assert phi(rows).tolist() == [0.0, 0.0, 0.0, -2.0, -2.0, 0.0]


def test_no_byte_of_a_continuation_reaches_into_the_prompt():
    """With a tokenizer that decodes bytes in a row together, as that of Llama 2."""
    vocab = {"<unk>": 0, "\u2581": 257, "\u2581a": 258}
    vocab |= {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    prompt = torch.tensor(tokenizer.encode("\u2581\u4e2d").ids)
    phi = TextPotential([keyword("a")], tokenizer.decode_batch, prompt)
    stray = 1 + 0xAD
    rows = [[stray, 258, 258], [258, stray, 258], [258, 258, stray], [*prompt[1:].tolist()]]
    texts = phi.texts(torch.tensor(rows))
    assert texts == ["\u4e2d\ufffd a a", "\u4e2d a\ufffd a", "\u4e2d a a", "\u4e2d\u4e2d"]
    assert phi.continuations(texts) == ["\ufffd a a", " a\ufffd a", " a a", "\u4e2d"]
