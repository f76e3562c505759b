"""Potentials and their prefix parts: those with a name, products, a user's; what is refused."""

import itertools
import math

import pytest
import torch
from tokenizers import Tokenizer
from worlds import INF, letters

from eval.options import POCKET
from twist.potential import TextPotential, each_once, factor_of

PROMPT = torch.tensor([1, 2])
MEANING = [  # a potential, a continuation, log phi
    ("keyword:dragon", " red Dragon-fly.", 0.0),
    ("keyword:dragon", " dragons snapdragon", -INF),
    ("keyword~0.5:red cat", " dog", -0.5),
    ("regex~2:a:b~c", " a:b", -2.0),
    ("without:dog", " a Dog", -INF),
    ("without~3:dog", " a Dog", -3.0),
    ("without:dog", " dogs", 0.0),
]
REFUSED = ["toxcity", "toxicity~2", "without:\t", "keyword", "ended:dog", "regex:", "", "a:b"]


def test_what_the_option_means_and_what_is_not_understood():
    for spec, text, log_phi in MEANING:
        factor = factor_of(spec)
        assert list(factor([text])) == [log_phi] and factor.reads == "continuations"
    assert factor_of("keyword:red cat").hints == ["red cat"]
    for spec in [*REFUSED, "keyword~x:cat"]:
        with pytest.raises(ValueError):
            factor_of(spec)


def test_a_product_sums_its_factors_and_their_prefix_parts_and_scores_equal_texts_once():
    """Of whole texts, of continuations, and of whether an end has finished them, which is no part
    of the text; nor is what follows."""
    read = []

    def length(texts):
        read.append(texts)
        return [-float(len(text)) for text in texts]

    def begun(texts):
        return [-10.0 * text.startswith("d") for text in texts]

    begun.reads, begun.prefix = "continuations", lambda texts: [0.5 * len(text) for text in texts]
    phi = TextPotential([length, begun, factor_of("ended~3")], letters, PROMPT, (0, 6))
    tokens = torch.tensor([[3, 4, 5], [3, 0, 0], [3, 6, 0], [1, 2, 3], [3, 4, 5], [0, 0, 0]])
    assert phi.texts(tokens) == ["bcdef", "bcd", "bcd", "bcbcd", "bcdef", "bc"]
    assert phi(tokens).tolist() == [-18.0, -13.0, -13.0, -8.0, -18.0, -2.0]
    assert read == [["bcdef", "bcd", "bcbcd", "bc"]]
    assert phi.has_prefix and phi.log_prefix(tokens[:, :2]).tolist() == [1.0, 0.5, 0.5, 1.0, 1.0, 0]


WRONG = [torch.zeros(2, 1), [0.0], 0.0, [math.nan, 0.0], torch.tensor([0.0, INF]), [True, False]]


def test_numbers_may_come_in_any_form_but_nan_infinity_and_truth_values_are_none():
    for values in ([0, -1.5], torch.tensor([0, -1.5]).bfloat16().requires_grad_()):
        found = each_once(lambda _, values=values: values, ["a", "b", "a"])
        assert found.tolist() == [0.0, -1.5, 0.0] and found.dtype == torch.float64
    for values in WRONG:
        with pytest.raises(ValueError, match="must return log phi"):
            each_once(lambda _, values=values: values, ["a", "b"])


WORDS = [  # a word, a text that has it, one that does not
    ("cat", "Cat猫", "cats"),
    ("猫", "黒猫が", "犬が"),
    ("แมว", "ฉันรักแมวมาก", "หมา"),
    ("AI", "このAIは", "said"),
    ("C++", "in C++17", "in C"),
]


@pytest.mark.parametrize(("word", "having", "lacking"), WORDS)
def test_words_end_where_their_script_says(word, having, lacking):
    assert factor_of(f"keyword:{word}")([having, lacking]) == [0.0, -INF]
    factor = factor_of(f"without:{word}")
    assert factor([having, lacking]) == [-INF, 0.0] == factor.prefix([f"{having} ", lacking])


@pytest.mark.parametrize("spec", ["without:dog", "without~2:dog", "without:猫"])
def test_f_is_never_below_phi_of_a_continuation(spec):
    factor = factor_of(spec)
    pieces = [f" {spec.partition(':')[2]}", "gy", ".", '"', "猫", " a b"]
    texts = ["".join(text) for text in itertools.product(pieces, repeat=4)]
    phi = dict(zip(texts, factor(texts), strict=True))
    for begun in {text[:n] for text in texts for n in range(len(text))}:
        (log_f,) = factor.prefix([begun])
        assert log_f >= max(value for text, value in phi.items() if text.startswith(begun)), begun
    if "dog" in spec:
        assert factor.prefix([" dog", " dog.", " doggy."]) == [0.0, factor([" dog"])[0], 0.0]


def test_texts_that_end_inside_a_character_are_read():
    """Of the shipped tokenizer, whose tokens are bytes where a character is rare."""
    tokenizer = Tokenizer.from_file(str(POCKET / "lm" / "tokenizer.json"))
    prompt = torch.tensor(tokenizer.encode("Once upon").ids)
    ids = tokenizer.encode(" 猫 cat").ids
    phi = TextPotential([factor_of("keyword:cat")], tokenizer.decode_batch, prompt)
    cut = [ids[:2] + ids[-1:], ids[2:], ids[:2] * 2]
    for row, log_phi in zip([ids, *cut], (0.0, 0.0, 0.0, -INF), strict=True):
        assert phi(torch.tensor([row])).tolist() == [log_phi], tokenizer.decode(row)


def test_numbers_of_a_function_keep_all_their_digits():
    assert each_once(lambda texts: [-1 / 3 for _ in texts], ["a"]).item() == -1 / 3
