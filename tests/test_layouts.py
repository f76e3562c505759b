"""Every layout of a checkpoint, and the paper's sizes, against transformers; and what is refused.

The networks are random. Those of the Hub are tested by the tests marked `hub`:
`python -m pytest -m hub tests/test_layouts.py`.
"""

import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
import transformers
from networks import (
    AUTO,
    LOAD,
    PREFIX,
    TEXTS,
    VOCAB_SIZE,
    assert_close,
    expected,
    oracle,
    write_checkpoint,
    write_tokenizer,
    write_vocabulary,
)
from safetensors.torch import load_file, save_file

import tinystories
from eval.run.options import PRESETS, RunConfig
from eval.scorers import toxicity
from tinystories import InputError
from tinystories.checkpoint import (
    fingerprint,
    read_json,
    read_weights,
    replacing,
    write_json,
    write_text,
)
from tinystories.fast import pack
from tinystories.tokenizer import read_tokenizer
from twist.potential import Factor, TextPotential

PAPER = {
    "lm": lambda: transformers.GPTNeoForCausalLM(
        transformers.GPTNeoConfig(
            hidden_size=768,
            num_layers=4,
            num_heads=16,
            attention_types=[[["global", "local"], 2]],
        )
    ),
    "toxicity": lambda: transformers.RobertaForSequenceClassification(
        transformers.RobertaConfig(
            vocab_size=50265,
            max_position_embeddings=514,
            type_vocab_size=1,
            layer_norm_eps=1e-5,
            num_labels=1,
        )
    ),
    "similarity": lambda: transformers.BertModel(
        transformers.BertConfig(
            hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
        )
    ),
}
PARAMETERS = {"lm": 107_111_424, "toxicity": 124_646_401, "similarity": 22_713_216}
OPTIONS = {"lm": "lm", "toxicity": "toxicity_model", "similarity": "similarity_model"}
LAYOUTS = ["safetensors", "sharded", "bin", "old bin", "sharded bin"]


def write(path: Path, role: str, model, layout: str, dtype: torch.dtype = torch.float32) -> None:
    """Save a network in `dtype`: safetensors by transformers, the rest as older versions did."""
    model.to(dtype)
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    model.save_pretrained(path, max_shard_size=size // 3 if "sharded" in layout else size * 2)
    model.float()
    write_tokenizer(path, role)
    if not layout.endswith("bin"):
        return
    for file in path.glob("*.safetensors"):
        name = f"pytorch_{file.stem}.bin"
        torch.save(load_file(file), path / name, _use_new_zipfile_serialization=layout != "old bin")
        file.unlink()
    for index in path.glob("*.index.json"):
        places = read_json(index)["weight_map"]
        places = {name: f"pytorch_{Path(file).stem}.bin" for name, file in places.items()}
        write_json(path / "pytorch_model.bin.index.json", {"metadata": {}, "weight_map": places})
        index.unlink()


def assert_same(role: str, path: Path, network, tokens: int = 20) -> None:
    """The loaded network, plain and packed, gives what that of transformers gives."""
    model, _ = LOAD[role](path)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, model.config.vocab_size, (2, tokens), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    wanted = expected(role, network, inputs)
    for version in (model, pack(model)):
        with torch.no_grad():
            assert_close(version(ids) if role == "lm" else version(*inputs.values()), wanted)


@pytest.fixture(scope="module", params=list(LOAD))
def role(request):
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tmp_path, role, layout, dtype):
    write(tmp_path, role, oracle(role), layout, dtype)
    suffixes = {path.suffix for path in tmp_path.glob("*model*") if "index" not in path.name}
    assert suffixes == {".bin" if layout.endswith("bin") else ".safetensors"}
    assert len(list(tmp_path.glob("*-of-*"))) > 1 or "sharded" not in layout
    network = AUTO[role].from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert_same(role, tmp_path, network)


def parameters(role: str, path: Path) -> int:
    """As the paper counts: with the head of the language model and with an unused pooler."""
    model = LOAD[role](path)[0]
    extra = [model.wte.weight] if role == "lm" else []
    extra += [tensor for name, tensor in read_weights(path)[0].items() if "pooler." in name]
    return sum(tensor.numel() for tensor in [*model.parameters(), *extra])


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("bin", torch.float16), pytest.param("sharded", torch.float32, marks=pytest.mark.slow)],
)
def test_the_sizes_of_the_paper(tmp_path, role, layout, dtype):
    torch.manual_seed(0)
    network = PAPER[role]().eval()
    write(tmp_path, role, network.to(dtype).float(), layout, dtype)
    assert parameters(role, tmp_path) == PARAMETERS[role]
    assert_same(role, tmp_path, network, tokens=30)
    shutil.rmtree(tmp_path)  # hundreds of megabytes


def test_names_that_differ_by_the_prefix(tmp_path, role):
    network = write_checkpoint(tmp_path, role)
    tensors, prefix = load_file(tmp_path / "model.safetensors"), PREFIX[role]
    bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    full = {n if "classifier" in n else prefix + n: tensor for n, tensor in bare.items()}
    for changed in (bare, full):
        save_file(changed, tmp_path / "model.safetensors")
        assert_same(role, tmp_path, network)
    name = next(n for n in bare if "classifier" not in n)
    save_file(bare | {prefix + name: bare[name] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=f"{name} is there with and without {prefix}"):
        LOAD[role](tmp_path)


@pytest.mark.parametrize("layout", ["sharded", "sharded bin"])
def test_an_index_that_disagrees_with_its_files(tmp_path, layout):
    write(tmp_path, "lm", oracle("lm"), layout)
    (index,) = tmp_path.glob("*.index.json")
    places = read_json(index)["weight_map"]
    first, *others = sorted(set(places.values()))
    for wrong in ("../secret.bin", "/etc/hostname", "..", "", 3, None):
        write_json(index, {"weight_map": places | {"wte.weight": wrong}})
        with pytest.raises(InputError, match=r"index|not a regular file|no such file"):
            tinystories.load(tmp_path)
    for content in ({}, {"weight_map": {}}, {"weight_map": []}):
        write_json(index, content)
        with pytest.raises(InputError, match=r"index\.json: not an index of weights"):
            tinystories.load(tmp_path)
    write_json(index, {"weight_map": dict.fromkeys(places, first)})
    with pytest.raises(InputError, match=r"missing: "):
        tinystories.load(tmp_path)
    write_json(index, {"weight_map": places})
    shutil.copy(tmp_path / first, tmp_path / others[0])
    with pytest.raises(InputError, match=r"-of-.* is also in another file"):
        tinystories.load(tmp_path)
    (tmp_path / first).unlink()
    with pytest.raises(InputError, match=f"{first}: no such file"):
        tinystories.load(tmp_path)


class Trap:
    """Unpickled without care, it makes a directory."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("value", ["trap", [1.0], {"wte.weight": 1.0}, b"\x80\x02garbage"])
def test_of_a_pickle_only_tensors_are_read(tmp_path, value):
    write(tmp_path, "lm", oracle("lm"), "bin")
    file, sprung = tmp_path / "pytorch_model.bin", tmp_path / "sprung"
    torch.save({"wte.weight": Trap(sprung)} if value == "trap" else value, file)
    if isinstance(value, bytes):
        file.write_bytes(value)
    with pytest.raises(InputError, match=r"pytorch_model\.bin: its tensors cannot be read"):
        tinystories.load(tmp_path)
    assert not sprung.exists()


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
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert ids == theirs(text)["input_ids"], text
        plain = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        assert tokenizer.decode(ids) == theirs.decode(ids, **plain)
    assert tokenizer.get_vocab_size() == len(theirs)
    assert tokenizer.num_special_tokens_to_add(False) == (0 if kind == "gpt2" else 2)


def test_older_tokenizer_files_that_are_broken_or_too_large(tmp_path):
    write_vocabulary(tmp_path, "gpt2")
    with pytest.raises(InputError, match=r"vocab\.json: .*where config\.json has vocab_size 100"):
        read_tokenizer(tmp_path, 100)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(InputError, match=r"tokenizer\.json: no such file"):
        read_tokenizer(tmp_path, 300)
    (tmp_path / "merges.txt").write_text("one two three four\n")
    with pytest.raises(InputError, match=r"vocab\.json: no tokenizer for this network"):
        read_tokenizer(tmp_path, 300)
    (tmp_path / "vocab.json").unlink()
    (tmp_path / "vocab.txt").write_text("[UNK]\nword\n")
    with pytest.raises(InputError, match=r"vocab\.txt: no tokenizer for this network"):
        read_tokenizer(tmp_path, 300)


def test_a_vocabulary_larger_than_the_tokenizer(tmp_path):
    """As where a table is padded to a round number: tokens without a text leave no trace in it."""
    write_checkpoint(tmp_path, "lm")
    model, tokenizer = tinystories.load(tmp_path)
    assert tokenizer.get_vocab_size() < model.config.vocab_size - 1
    row, extra = tokenizer.encode("the cat").ids, model.config.vocab_size - 1
    factor = Factor(lambda texts: -2 * torch.arange(1.0, len(texts) + 1))
    potential = TextPotential([factor], tokenizer.decode_batch, torch.tensor(row))
    tokens = torch.tensor([[extra, *row], [*row, extra], [*row, *row]])
    texts = potential.texts(tokens)
    assert texts[0] == texts[1] == "the catthe cat" and potential(tokens).tolist() == [-2, -2, -4]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_what_is_not_a_regular_file_is_refused(tmp_path, name):
    write_checkpoint(tmp_path, "lm")
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name) if hasattr(os, "mkfifo") else (tmp_path / name).mkdir()
    with pytest.raises(InputError, match=f"{name}: .*not a regular file"):
        tinystories.load(tmp_path)


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    write_text(tmp_path / "new" / "file", "old")
    mode = stat.S_IMODE(os.stat(tmp_path / "new" / "file").st_mode)
    with pytest.raises(RuntimeError), replacing(tmp_path / "new" / "file") as temporary:
        temporary.write_text("half")
        assert temporary.name.endswith(".tsmc-partial")
        raise RuntimeError
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]
    assert (tmp_path / "new" / "file").read_text() == "old"
    (tmp_path / "plain").write_text("")
    assert mode == stat.S_IMODE(os.stat(tmp_path / "plain").st_mode), "as any file of the user"
    with pytest.raises(InputError, match="plain/file: cannot be written"):
        write_text(tmp_path / "plain" / "file", "")


@pytest.fixture(scope="module")
def genuine(role):
    """A role, and the paper's checkpoint of it in the cache of the Hub."""
    return role, RunConfig(preset="paper").checkpoint(OPTIONS[role])


@pytest.mark.hub
def test_the_genuine_weights_and_tokenizers(genuine):
    role, path = genuine
    assert parameters(role, path) == PARAMETERS[role]
    assert_same(role, path, AUTO[role].from_pretrained(path, dtype=torch.float32).eval(), 30)
    name, _, revision = getattr(PRESETS["paper"], OPTIONS[role]).partition("@")
    theirs = transformers.AutoTokenizer.from_pretrained(name, revision=revision)
    for text in TEXTS:
        assert LOAD[role](path)[1].encode(text).ids == theirs(text)["input_ids"]


@pytest.mark.hub
def test_the_base_toxicity_of_the_paper():
    config, generator = RunConfig(preset="paper"), torch.Generator().manual_seed(0)
    model, tokenizer = tinystories.load(config.checkpoint("lm"))
    score = toxicity.ToxicityScorer(*toxicity.load(config.checkpoint("toxicity_model")))
    prompt = torch.tensor(tokenizer.encode(config.prompt).ids)
    assert len(prompt) == 8
    potential = TextPotential([Factor(score)], tokenizer.decode_batch, prompt)
    base, log_scores = tinystories.Conditional(pack(model), prompt, config.length), []
    for _ in range(20):
        decoder, tokens = base.decoder(100), []
        for t in range(config.length):
            probabilities = base.head(decoder.hidden).softmax(-1)
            tokens.append(torch.multinomial(probabilities, 1, generator=generator)[:, 0])
            if t + 1 < config.length:
                decoder.extend(tokens[-1], None)
        log_scores.append(potential(torch.stack(tokens, 1)))
    mean = torch.cat(log_scores).exp().mean()
    assert abs(mean - 0.010) < 0.005  # the paper's 0.010, some 3 sigma
