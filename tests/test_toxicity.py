"""The toxicity classifier and its scorer against transformers, and the ways a checkpoint can be wrong."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, RobertaConfig, RobertaModel
from transformers import RobertaForSequenceClassification as Oracle

from eval.scorers import toxicity
from tinystories import fast
from tinystories.checkpoint import write_json
from tinystories.errors import InputError

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
TEXTS = [
    "Once upon a time, there was a small dog who liked to bark at the moon every night.",
    "No.",
    "The cat sat on the mat, and it was happy.",
    "",
    "Lily saw a big red ball in the park. She ran to it and she kicked it as far as she could!",
    "They were mean to him",
]
LIMIT = 40  # tokens that the models of these tests have room for


def make_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    pair = "<s> $A </s> </s> $B </s>"
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", pair=pair, special_tokens=ends)
    return tokenizer


def make_config(**changes):
    sizes = {"vocab_size": 340, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 40, "max_position_embeddings": LIMIT + 2, "type_vocab_size": 1}
    return RobertaConfig(**(sizes | {"layer_norm_eps": 1e-5, "num_labels": 1, "pad_token_id": 1} | changes))


def randomise(model, seed):
    """Weights of size 1 in every tensor, biases and type rows included: texts differ, and no tensor can be missed."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("LayerNorm.weight"):
            parameter.data = 1 + 0.3 * noise
        elif parameter.ndim == 1:
            parameter.data = 0.3 * noise
        else:
            parameter.data = noise if "embeddings" in name else noise / parameter.shape[1] ** 0.5
    return model.eval()


def write(path, oracle, tokenizer):
    oracle.save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    write_json(path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A directory written by transformers and the network that it holds."""
    oracle = randomise(Oracle(make_config()), seed=0)
    return write(tmp_path_factory.mktemp("roberta"), oracle, make_tokenizer()), oracle


def oracle_logits(path, oracle, texts):
    encoded = AutoTokenizer.from_pretrained(path)(
        texts, padding=True, truncation=True, max_length=LIMIT, return_token_type_ids=False, return_tensors="pt"
    )
    with torch.no_grad():
        return oracle(**encoded).logits[:, 0], encoded


def assert_close(actual, expected):
    """Within 2e-5 of the largest expected value."""
    assert (actual - expected).abs().max() <= 2e-5 * expected.abs().max()


def edit(source, target, change):
    """A copy of a checkpoint whose tensors went through `change`."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    save_file(change(load_file(source / "model.safetensors")), target / "model.safetensors")
    return target


def without(tensors, lost):
    return {name: tensor for name, tensor in tensors.items() if name != lost}


def test_logits_of_a_padded_batch(checkpoint, monkeypatch):
    path, oracle = checkpoint
    expected, encoded = oracle_logits(path, oracle, TEXTS)
    assert encoded.attention_mask.sum(1).unique().numel() > 3
    model, _ = toxicity.load(path)
    monkeypatch.setattr(fast, "SMALLEST", 1)  # all products of the fast version go to oneDNN
    for version in (model, fast.accelerate(copy.deepcopy(model))):
        with torch.no_grad():
            actual = version(encoded.input_ids, encoded.attention_mask)
        assert actual.shape == (len(TEXTS),) and actual.dtype == torch.float32
        assert_close(actual, expected)


@pytest.mark.parametrize("sizes", [{"num_hidden_layers": 1, "num_attention_heads": 1}, {"pad_token_id": 3}])
def test_other_shapes(tmp_path, sizes):
    oracle = randomise(Oracle(make_config(**sizes)), seed=1)
    if "pad_token_id" in sizes:
        ids = torch.tensor([[0, 9, 8, 2, 3, 3], [0, 7, 11, 12, 13, 2]])
        mask = (ids != 3).long()
    else:
        ids, mask = torch.tensor([[0, 9, 8, 2]]), torch.ones(1, 4, dtype=torch.long)
    model, _ = toxicity.load(write(tmp_path, oracle, make_tokenizer()))
    with torch.no_grad():
        assert_close(model(ids, mask), oracle(input_ids=ids, attention_mask=mask).logits[:, 0])


def test_scores_are_log_probabilities_of_toxic(checkpoint):
    path, oracle = checkpoint
    logits, _ = oracle_logits(path, oracle, TEXTS)
    scores = toxicity.ToxicityScorer(*toxicity.load(path))(TEXTS)
    assert scores.dtype == torch.float32
    assert_close(scores, torch.log(1 - torch.sigmoid(logits.double())))


def test_scores_stay_finite_where_the_probability_rounds_to_zero(checkpoint):
    path, _ = checkpoint
    model, tokenizer = toxicity.load(path)
    model.classifier.out_proj.bias.data += 100
    scores = toxicity.ToxicityScorer(model, tokenizer)(TEXTS)
    assert torch.isfinite(scores).all() and (scores < -50).all()


@pytest.mark.parametrize("prefix", ["roberta.", ""])
def test_pooler_and_buffers_are_ignored_with_and_without_prefix(checkpoint, tmp_path, prefix):
    path, oracle = checkpoint
    pooled = randomise(RobertaModel(make_config(), add_pooling_layer=True), seed=2)
    extra = {f"{prefix}{name}": tensor for name, tensor in pooled.state_dict().items() if name.startswith("pooler.")}
    assert len(extra) == 2
    for name in ("position_ids", "token_type_ids"):
        extra[f"{prefix}embeddings.{name}"] = torch.zeros(1, LIMIT + 2, dtype=torch.long)

    def rename(tensors):
        return {name.replace("roberta.", prefix): tensor for name, tensor in tensors.items()} | extra

    model, tokenizer = toxicity.load(edit(path, tmp_path, rename))
    expected, _ = oracle_logits(path, oracle, TEXTS)
    assert_close(toxicity.ToxicityScorer(model, tokenizer)(TEXTS), F.logsigmoid(-expected))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_on_disk_is_computed_in_float32(checkpoint, tmp_path, dtype):
    path, _ = checkpoint
    edit(path, tmp_path, lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    oracle = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32)
    expected, encoded = oracle_logits(path, oracle, TEXTS)
    model, _ = toxicity.load(tmp_path)
    with torch.no_grad():
        assert_close(model(encoded.input_ids, encoded.attention_mask), expected)


def test_score_depends_neither_on_the_batch_nor_on_the_order(checkpoint):
    model, tokenizer = toxicity.load(checkpoint[0])
    alone = torch.cat([toxicity.ToxicityScorer(model, tokenizer)([text]) for text in TEXTS])
    assert alone.std() > 0.1
    for batch_size in (1, 2, 4, 100):
        scorer = toxicity.ToxicityScorer(model, tokenizer, batch_size)
        torch.testing.assert_close(scorer(TEXTS), alone, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(scorer(TEXTS[::-1]), alone.flip(0), rtol=1e-6, atol=1e-6)


def test_padding_shifts_no_position_and_is_not_attended_to(checkpoint):
    model, _ = toxicity.load(checkpoint[0])
    ids = torch.tensor([[0, 20, 21, 22, 2]])
    right = F.pad(ids, (0, 6), value=1)
    left = F.pad(ids, (6, 0), value=1)
    with torch.no_grad():
        expected = model.roberta.hidden(ids, torch.ones_like(ids), torch.arange(2, 7))[:, 0]
        logit = model.classifier(expected)
        torch.testing.assert_close(model(right, (right != 1).long()), logit, rtol=1e-6, atol=1e-6)
        seen = model.roberta.hidden(left, (left != 1).long(), torch.tensor([[1] * 6 + [2, 3, 4, 5, 6]]))[:, 6]
    torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-5)


def test_text_longer_than_the_limit_is_cut_and_keeps_its_last_special_token(checkpoint):
    path, oracle = checkpoint
    model, tokenizer = toxicity.load(path)
    scorer = toxicity.ToxicityScorer(model, tokenizer)
    texts = ["the moon " * 200, "hi"]
    encoding = scorer.run.tokenizer.encode(texts[0])
    assert len(encoding.ids) == LIMIT and encoding.tokens[0] == "<s>" and encoding.tokens[-1] == "</s>"
    expected, _ = oracle_logits(path, oracle, texts)
    assert_close(scorer(texts), F.logsigmoid(-expected))
    assert len(tokenizer.encode(texts[0]).ids) > LIMIT
    with pytest.raises(InputError, match=f"41 tokens exceed the classifier's {LIMIT}"):
        model(torch.full((1, LIMIT + 1), 9), torch.ones(1, LIMIT + 1))


@torch.no_grad()
def test_bfloat16_scores_are_near_and_not_rounded_at_the_end(checkpoint):
    model, tokenizer = toxicity.load(checkpoint[0])
    wanted = toxicity.ToxicityScorer(model, tokenizer)(TEXTS)
    rounded = toxicity.ToxicityScorer(model.to(torch.bfloat16), tokenizer)(TEXTS)
    assert rounded.dtype == torch.float32 and not torch.equal(rounded, rounded.bfloat16().float())
    assert (rounded - wanted).abs().mean() < 0.1


def test_no_texts_and_no_batch(checkpoint):
    model, tokenizer = toxicity.load(checkpoint[0])
    assert toxicity.ToxicityScorer(model, tokenizer)([]).shape == (0,)
    with pytest.raises(InputError, match="batch_size is 0"):
        toxicity.ToxicityScorer(model, tokenizer, batch_size=0)


def test_missing_and_left_over_tensors_are_named(checkpoint, tmp_path):
    lost = "roberta.encoder.layer.1.attention.self.query.weight"
    edit(checkpoint[0], tmp_path, lambda tensors: without(tensors, lost) | {"lm_head.bias": torch.zeros(3)})
    with pytest.raises(InputError, match=rf"missing: {lost}; left over: lm_head.bias") as caught:
        toxicity.load(tmp_path)
    assert str(tmp_path / "model.safetensors") in str(caught.value) and "\n" not in str(caught.value)


def test_misshapen_tensor_is_named(checkpoint, tmp_path):
    name = "classifier.dense.weight"
    edit(checkpoint[0], tmp_path, lambda tensors: tensors | {name: torch.zeros(24, 23)})
    with pytest.raises(InputError, match=rf"{name} has shape \[24, 23\] where config.json implies \[24, 24\]"):
        toxicity.load(tmp_path)


def test_weights_that_are_not_finite_are_refused(checkpoint, tmp_path):
    name = "roberta.encoder.layer.0.output.dense.bias"
    edit(checkpoint[0], tmp_path, lambda tensors: tensors | {name: torch.full((24,), float("nan"))})
    with pytest.raises(InputError, match=f"{name} holds NaN"):
        toxicity.load(tmp_path)


def test_logit_that_is_not_finite_is_refused(checkpoint):
    model, tokenizer = toxicity.load(checkpoint[0])
    row = tokenizer.encode("No.").ids[1]
    model.roberta.embeddings.word_embeddings.weight.data[row] = float("nan")
    with pytest.raises(InputError, match=r"the score of 'No\.' is NaN"):
        toxicity.ToxicityScorer(model, tokenizer, batch_size=2)(["hi", "No.", "the moon"])


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model_type", "bert", "model_type is 'bert', not roberta"),
        ("hidden_act", "relu", "hidden_act is 'relu', not gelu"),
        ("id2label", {"0": "a", "1": "b"}, "'1': 'b'} where one logit is needed"),
        ("num_attention_heads", 5, "no multiple of num_attention_heads"),
        ("hidden_size", None, "not a roberta configuration"),
        ("pad_token_id", 340, "pad_token_id is 340, not a whole number from 0 to 339"),
        ("vocab_size", 300, "where config.json implies"),
        ("id2label", 5, "id2label is 5 where one logit is needed"),
        ("num_hidden_layers", 10**9, "not a whole number from 1 to 1000"),
        ("type_vocab_size", 1.0, "type_vocab_size is 1.0"),
    ],
)
def test_configurations_that_are_no_such_classifier(checkpoint, tmp_path, field, value, words):
    edit(checkpoint[0], tmp_path, dict)
    config = json.loads((tmp_path / "config.json").read_text()) | {field: value}
    write_json(tmp_path / "config.json", config)
    with pytest.raises(InputError, match=words):
        toxicity.load(tmp_path)


def test_tokenizers_that_do_not_fit(checkpoint, tmp_path):
    edit(checkpoint[0], tmp_path, dict)
    bare = make_tokenizer()
    bare.post_processor = processors.ByteLevel()
    bare.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match="adds no special tokens"):
        toxicity.load(tmp_path)
    large = make_tokenizer()
    large.add_tokens([f"word{number}" for number in range(50)])
    large.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match=r"380 tokens where config\.json has 340"):
        toxicity.load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_save_is_read_by_transformers_and_by_load(checkpoint, tmp_path, dtype):
    model, tokenizer = toxicity.load(checkpoint[0])
    toxicity.save(tmp_path, model, tokenizer, dtype)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {dtype}
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert saved.config.num_labels == 1
    logits, encoded = oracle_logits(tmp_path, saved, TEXTS)
    with torch.no_grad():
        assert_close(toxicity.load(tmp_path)[0](encoded.input_ids, encoded.attention_mask), logits)
    assert_close(toxicity.ToxicityScorer(*toxicity.load(tmp_path))(TEXTS), F.logsigmoid(-logits))
    if dtype == torch.float32:
        assert_close(logits, oracle_logits(*checkpoint, TEXTS)[0])
