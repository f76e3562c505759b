"""Every layout of a checkpoint against transformers, older tokenizers, and what is refused.

The networks are random. Those of the Hub are tested by the tests marked `hub`:
`python -m pytest -m hub tests/test_layouts.py`.
"""

import os
import shutil
from pathlib import Path

import networks
import pytest
import torch
import transformers
from networks import AUTO, LOAD, TEXTS, assert_close, oracle, write, write_vocabulary

import tinystories
from eval.run.options import PRESETS, RunConfig
from eval.scorers import toxicity
from tinystories import InputError
from tinystories.checkpoint import fingerprint, read_json, read_weights, write_json
from tinystories.fast import pack
from tinystories.tokenizer import read_tokenizer

PARAMETERS = {"lm": 107_111_424, "toxicity": 124_646_401, "similarity": 22_713_216}
OPTIONS = {"lm": "lm", "toxicity": "toxicity_model", "similarity": "similarity_model"}
LAYOUTS = ["safetensors", "sharded", "bin", "old bin", "sharded bin"]


@pytest.fixture(scope="module", params=list(LOAD))
def role(request):
    return request.param


def assert_same(role: str, path: Path, network, tokens: int = 20) -> None:
    """The loaded network, plain and packed, gives what that of transformers gives."""
    model, _ = LOAD[role](path)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, model.config.vocab_size, (2, tokens), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    wanted = networks.expected(role, network, inputs)
    for version in (model, pack(model)):
        with torch.no_grad():
            assert_close(version(ids) if role == "lm" else version(*inputs.values()), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tmp_path, role, layout, dtype):
    write(tmp_path, role, oracle(role), layout, dtype)
    suffixes = {path.suffix for path in tmp_path.glob("*model*") if "index" not in path.name}
    assert suffixes == {".bin" if layout.endswith("bin") else ".safetensors"}
    assert len(list(tmp_path.glob("*-of-*"))) > 1 or "sharded" not in layout
    assert_same(role, tmp_path, AUTO[role].from_pretrained(tmp_path, dtype=torch.float32).eval())


@pytest.mark.parametrize("layout", ["sharded", "sharded bin"])
def test_an_index_that_disagrees_with_its_files(tmp_path, layout):
    write(tmp_path, "lm", oracle("lm"), layout)
    (index,) = tmp_path.glob("*.index.json")
    places = read_json(index)["weight_map"]
    first, *others = sorted(set(places.values()))
    wrong = ["../secret.bin", "/etc/hostname", "..", "", 3, None, "config.json"]
    maps = [{"weight_map": places | {"wte.weight": file}} for file in wrong]
    maps += [{}, {"weight_map": {}}, {"weight_map": []}]
    maps += [{"weight_map": dict.fromkeys(places, first)}]
    for content in maps:
        write_json(index, content)
        with pytest.raises(InputError, match=r"/model|/pytorch_model|/config\.json|/\.\."):
            tinystories.load(tmp_path)
    write_json(index, {"weight_map": places})
    shutil.copy(tmp_path / first, tmp_path / others[0])
    with pytest.raises(InputError, match=r"-of-.* is also in another file"):
        tinystories.load(tmp_path)
    (tmp_path / first).unlink()
    with pytest.raises(InputError, match=f"{first}: no such file"):
        tinystories.load(tmp_path)


@pytest.mark.parametrize("value", [Path("code"), [1.0], {"wte.weight": 1.0}, b"garbage"])
def test_of_a_pickle_only_tensors_are_read(tmp_path, value):
    write(tmp_path, "lm", oracle("lm"), "bin")
    torch.save(value, tmp_path / "pytorch_model.bin")
    if isinstance(value, bytes):
        (tmp_path / "pytorch_model.bin").write_bytes(value)
    with pytest.raises(InputError, match=r"pytorch_model\.bin: its tensors cannot be read"):
        tinystories.load(tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fingerprint_covers_the_files_of_every_layout(tmp_path, layout):
    write(tmp_path, "lm", oracle("lm"), layout)
    (tmp_path / "tokenizer.json").unlink()
    write_vocabulary(tmp_path, "gpt2")
    first = fingerprint(tmp_path)
    for path in tmp_path.iterdir():
        content = path.read_bytes()
        path.write_bytes(content[:-2] + b" " + content[-2:])
        assert (fingerprint(tmp_path) == first) == (path.name == "generation_config.json"), path
        path.write_bytes(content)
    assert fingerprint(tmp_path) == first


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gpt2", {}),
        ("gpt2", {"add_prefix_space": True}),
        ("roberta", {}),
        ("bert", {}),
        ("bert", {"do_lower_case": False}),
    ],
)
def test_a_tokenizer_of_older_files_is_that_of_transformers(tmp_path, kind, options):
    write_vocabulary(tmp_path, kind, **options)
    tokenizer = read_tokenizer(tmp_path, 300)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    plain = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert ids == theirs(text)["input_ids"], text
        assert tokenizer.decode(ids) == theirs.decode(ids, **plain)
    assert tokenizer.get_vocab_size() == len(theirs)
    assert tokenizer.num_special_tokens_to_add(False) == (0 if kind == "gpt2" else 2)


def test_older_tokenizer_files_that_are_broken_or_too_large(tmp_path):
    def refusal(words: str, vocab_size: int = 300):
        with pytest.raises(InputError, match=words):
            read_tokenizer(tmp_path, vocab_size)

    write_vocabulary(tmp_path, "gpt2")
    refusal(r"vocab\.json: .*where config\.json has vocab_size 100", vocab_size=100)
    (tmp_path / "merges.txt").unlink()
    refusal(r"tokenizer\.json: no such file")
    (tmp_path / "merges.txt").write_text("one two three four\n")
    refusal(r"vocab\.json: no tokenizer for this network")
    (tmp_path / "vocab.json").unlink()
    (tmp_path / "vocab.txt").write_text("[UNK]\nword\n")
    refusal(r"vocab\.txt: no tokenizer for this network")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_what_is_not_a_regular_file_is_refused(tmp_path, name):
    write(tmp_path, "lm", oracle("lm"))
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match=f"{name}: .*not a regular file"):
        tinystories.load(tmp_path)


def parameters(role: str, path: Path) -> int:
    """As the paper counts: with the head of the language model and with an unused pooler."""
    model = LOAD[role](path)[0]
    extra = [model.wte.weight] if role == "lm" else []
    extra += [tensor for name, tensor in read_weights(path)[0].items() if "pooler." in name]
    return sum(tensor.numel() for tensor in [*model.parameters(), *extra])


@pytest.mark.hub
def test_the_genuine_weights_and_tokenizers(role):
    path = RunConfig(preset="paper").checkpoint(OPTIONS[role])
    assert parameters(role, path) == PARAMETERS[role]
    assert_same(role, path, AUTO[role].from_pretrained(path, dtype=torch.float32).eval(), 30)
    name, _, revision = getattr(PRESETS["paper"], OPTIONS[role]).partition("@")
    theirs = transformers.AutoTokenizer.from_pretrained(name, revision=revision)
    tokenizer = LOAD[role](path)[1]
    assert [tokenizer.encode(text).ids for text in TEXTS] == theirs(TEXTS)["input_ids"]


@pytest.mark.hub
def test_the_base_toxicity_of_the_paper():
    config, generator = RunConfig(preset="paper"), torch.Generator().manual_seed(0)
    model, tokenizer = tinystories.load(config.checkpoint("lm"))
    score = toxicity.ToxicityScorer(*toxicity.load(config.checkpoint("toxicity_model")))
    prompt = torch.tensor(tokenizer.encode(config.prompt).ids)
    assert len(prompt) == 8
    texts = []
    for _ in range(20):
        tokens = prompt.repeat(100, 1)
        for _ in range(config.length):
            with torch.no_grad():
                probabilities = model(tokens)[:, -1].softmax(-1)
            new = torch.multinomial(probabilities, 1, generator=generator)
            tokens = torch.cat([tokens, new], 1)
        texts += tokenizer.decode_batch(tokens.tolist())
    assert abs(score(texts).exp().mean() - 0.010) < 0.005  # the paper's 0.010, some 3 sigma
