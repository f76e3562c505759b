"""Every layout of a checkpoint, and the paper's sizes, against transformers: weights, tokenizers, fingerprints.

The networks are random. Those of the Hub are tested by the tests marked `hub`:
`python -m pytest -m hub tests/test_layouts.py`.
"""

import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from test_gpt_neo import SHAPES, SIZES, write_tokenizer
from test_similarity import make_config as bert_config
from test_toxicity import make_config as roberta_config
from test_toxicity import randomise
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import tinystories
from eval.run.options import PRESETS, RunConfig
from eval.scorers import similarity, toxicity
from tinystories import Conditional, InputError
from tinystories.checkpoint import fingerprint, read_json, read_weights, write_json
from tinystories.fast import accelerate
from tinystories.vocabulary import END_OF_TEXT, read_vocabulary
from twist import Factor, TextPotential

LOAD = {"lm": tinystories.load, "toxicity": toxicity.load, "similarity": similarity.load}
THEIRS = {"lm": AutoModelForCausalLM, "toxicity": AutoModelForSequenceClassification, "similarity": AutoModel}
SMALL = {
    "lm": lambda: transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(**SIZES, **SHAPES[1])),
    "toxicity": lambda: transformers.RobertaForSequenceClassification(roberta_config()),
    "similarity": lambda: transformers.BertModel(bert_config()),
}
PAPER = {
    "lm": lambda: transformers.GPTNeoForCausalLM(
        transformers.GPTNeoConfig(
            vocab_size=50257,
            hidden_size=768,
            num_layers=4,
            num_heads=16,
            max_position_embeddings=2048,
            attention_types=[[["global", "local"], 2]],
        )
    ),
    "toxicity": lambda: transformers.RobertaForSequenceClassification(
        transformers.RobertaConfig(
            vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5, num_labels=1
        )
    ),
    "similarity": lambda: transformers.BertModel(
        transformers.BertConfig(
            vocab_size=30522, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
        )
    ),
}
PARAMETERS = {"lm": 107_111_424, "toxicity": 124_646_401, "similarity": 22_713_216}
OPTIONS = {"lm": "lm", "toxicity": "toxicity_model", "similarity": "similarity_model"}
LAYOUTS = ["safetensors", "sharded", "bin", "old bin", "sharded bin"]


def write(path: Path, model, layout: str, dtype: torch.dtype = torch.float32) -> None:
    """Save a transformers model in `dtype`: safetensors by transformers itself, the rest as its older versions did."""
    model.to(dtype)
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    shards = {"max_shard_size": size // 3} if layout.startswith("sharded") else {}
    model.save_pretrained(path, **shards)
    if layout.endswith("bin"):
        for file in path.glob("*.safetensors"):
            zipped = layout != "old bin"
            name = "pytorch_" + file.with_suffix(".bin").name
            torch.save(load_file(file), path / name, _use_new_zipfile_serialization=zipped)
            file.unlink()
        for index in path.glob("*.index.json"):
            places = {name: f"pytorch_{Path(file).stem}.bin" for name, file in read_json(index)["weight_map"].items()}
            write_json(path / "pytorch_model.bin.index.json", {"metadata": {}, "weight_map": places})
            index.unlink()
    model.float()


def special_tokenizer(path: Path) -> None:
    """A word-level tokenizer.json that puts its words between two special ones."""
    write_tokenizer(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing("w1 $A w2", special_tokens=[("w1", 1), ("w2", 2)])
    tokenizer.save(str(path / "tokenizer.json"))


def outputs(role: str, ours, wanted, tokens: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the two networks make of random tokens."""
    ids = torch.randint(5, vocab_size, (2, tokens), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    with torch.no_grad():
        if role == "lm":
            return ours(ids), wanted(ids).logits
        if role == "toxicity":
            return ours(ids, mask), wanted(ids, attention_mask=mask).logits[:, 0]
        return ours(ids, mask), F.normalize(wanted(ids, attention_mask=mask).last_hidden_state.mean(1), dim=-1)


def assert_same(role: str, path: Path, wanted, tokens: int, vocab_size: int) -> None:
    """The loaded network, plain and then fast, gives what transformers' does, to 2e-5 of the largest number."""
    network, _ = LOAD[role](path)
    for version in (lambda plain: plain, accelerate):
        ours, expected = outputs(role, version(network), wanted, tokens, vocab_size)
        assert ours.shape == expected.shape and ours.dtype == torch.float32
        assert (ours - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.fixture(scope="module")
def small():
    """Random small networks of the three kinds."""
    return {role: randomise(make(), seed=1) for role, make in SMALL.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("role", LOAD)
def test_layouts(tmp_path, small, role, layout, dtype):
    write(tmp_path, small[role], layout, dtype)
    special_tokenizer(tmp_path)
    suffixes = {path.suffix for path in tmp_path.iterdir() if "model" in path.name and "index" not in path.name}
    assert suffixes == {".bin" if layout.endswith("bin") else ".safetensors"}
    assert len(list(tmp_path.glob("*-of-*"))) > 1 or "sharded" not in layout
    assert_same(role, tmp_path, THEIRS[role].from_pretrained(tmp_path, dtype=torch.float32).eval(), 20, 61)


@pytest.fixture(scope="module", params=LOAD)
def large(request):
    """A random network of the paper's size and its kind."""
    torch.manual_seed(0)
    return request.param, PAPER[request.param]().eval()


def parameters(role: str, path: Path) -> int:
    """As the paper counts: the head of the language model even where it is tied, the pooler though it is not used."""
    model = LOAD[role](path)[0]
    extra = [model.wte.weight] if role == "lm" else []
    extra += [tensor for name, tensor in read_weights(path)[0].items() if "pooler." in name]
    return sum(tensor.numel() for tensor in [*model.parameters(), *extra])


@pytest.mark.parametrize(("layout", "dtype"), [("sharded", torch.float32), ("bin", torch.float16)])
def test_the_sizes_of_the_paper(tmp_path, large, layout, dtype):
    role, model = large
    write(tmp_path, model, layout, dtype)
    special_tokenizer(tmp_path)
    assert parameters(role, tmp_path) == PARAMETERS[role]
    assert_same(role, tmp_path, model, 30, model.config.vocab_size)
    shutil.rmtree(tmp_path)  # hundreds of megabytes


@pytest.mark.parametrize("role", LOAD)
def test_names_that_differ_by_the_prefix(tmp_path, small, role):
    model = small[role]
    prefix = {"lm": "transformer.", "toxicity": "roberta.", "similarity": "bert."}[role]
    write(tmp_path, model, "safetensors")
    special_tokenizer(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name for name in tensors if name.startswith("classifier.")}
    bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    for changed in (bare, {name if name in kept else prefix + name: tensor for name, tensor in bare.items()}):
        save_file(changed, tmp_path / "model.safetensors")
        assert_same(role, tmp_path, model, 20, 61)
    name = next(iter(bare.keys() - kept))
    save_file(bare | {prefix + name: bare[name] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=rf"{name} stands with and without {prefix}"):
        LOAD[role](tmp_path)


@pytest.mark.parametrize("role", ["toxicity", "similarity"])
def test_of_the_pooler_only_the_pooler_is_passed_over(tmp_path, small, role):
    write(tmp_path, small[role], "safetensors")
    special_tokenizer(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if "pooler" not in name}
    width = small[role].config.hidden_size
    pooler = {"pooler.dense.weight": torch.ones(width, width), "pooler.dense.bias": torch.ones(width)}
    prefix = "roberta." if role == "toxicity" else ""
    for extra in ({}, pooler):
        save_file(tensors | {prefix + name: tensor for name, tensor in extra.items()}, tmp_path / "model.safetensors")
        assert_same(role, tmp_path, small[role], 20, 61)
    save_file(tensors | {"pooler.extra": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"left over: pooler\.extra"):
        LOAD[role](tmp_path)


@pytest.mark.parametrize("layout", ["sharded", "sharded bin"])
def test_an_index_that_disagrees_with_its_files_names_the_tensors(tmp_path, small, layout):
    write(tmp_path, small["lm"], layout)
    write_tokenizer(tmp_path)
    (index,) = tmp_path.glob("*.index.json")
    places = read_json(index)["weight_map"]
    (moved, *_), files = places, sorted(set(places.values()))
    other = next(file for file in files if file != places[moved])
    write_json(index, {"weight_map": places | {moved: other}})
    with pytest.raises(InputError, match=rf"-of-.*disagrees about {moved};"):
        tinystories.load(tmp_path)
    write_json(index, {"weight_map": places})
    (tmp_path / files[1]).unlink()
    with pytest.raises(InputError, match=rf"{files[1]}: no such file"):
        tinystories.load(tmp_path)
    write_json(index, {"weight_map": {}})
    with pytest.raises(InputError, match="holds no weight_map"):
        tinystories.load(tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fingerprint_covers_the_files_of_every_layout(tmp_path, small, layout):
    write(tmp_path, small["lm"], layout)
    write_vocabulary(tmp_path, "gpt2")
    first = fingerprint(tmp_path)
    for path in tmp_path.iterdir():
        content = path.read_bytes()
        path.write_bytes(content[:-2] + b" " + content[-2:])
        same = path.name in ("generation_config.json", "README.md")
        assert (fingerprint(tmp_path) == first) == same, path
        path.write_bytes(content)
    assert fingerprint(tmp_path) == first


TEXTS = [
    "Once upon a time, there was a cat.",
    " The  Cat's hat, caf\u00e9 \u732b!",
    "a <mask> b",
    "",
    "Unwritten\n words",
]
KINDS = {
    "gpt2": ("GPT2Tokenizer", [END_OF_TEXT]),
    "roberta": ("RobertaTokenizer", ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]),
    "bert": ("BertTokenizer", ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]),
}


def write_vocabulary(path: Path, kind: str, **options) -> None:
    """The files of a repository without tokenizer.json, trained on a few texts."""
    name, special = KINDS[kind]
    if kind == "bert":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=special, show_progress=False)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    tokenizer.train_from_iterator(TEXTS * 3 + [text.lower() for text in TEXTS], trainer)
    tokenizer.model.save(str(path))
    write_json(path / "tokenizer_config.json", {"tokenizer_class": name} | options)


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
    tokenizer = read_vocabulary(tmp_path, 300)
    expected = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert ids == expected(text)["input_ids"], text
        assert tokenizer.decode(ids) == expected.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    assert tokenizer.get_vocab_size() == len(expected)
    assert tokenizer.num_special_tokens_to_add(False) == (0 if kind == "gpt2" else 2)


def test_older_tokenizer_files_that_are_broken_or_too_large(tmp_path):
    write_vocabulary(tmp_path, "gpt2")
    with pytest.raises(InputError, match=r"vocab\.json: \d+ tokens where config\.json has 100"):
        read_vocabulary(tmp_path, 100)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(InputError, match=r"tokenizer\.json: no such file"):
        read_vocabulary(tmp_path, 300)
    (tmp_path / "merges.txt").write_text("one two three four\n")
    with pytest.raises(InputError, match=r"vocab\.json: no tokenizer can be made of it"):
        read_vocabulary(tmp_path, 300)
    (tmp_path / "vocab.json").unlink()
    (tmp_path / "vocab.txt").write_text("[UNK]\nword\n")
    with pytest.raises(InputError, match=r"vocab\.txt: no tokenizer can be made of it"):
        read_vocabulary(tmp_path, 300)


def test_a_vocabulary_larger_than_the_tokenizer(tmp_path, small):
    """As where a table is padded to a round number: rows without a word can be drawn and leave no trace in the text."""
    write(tmp_path, small["lm"], "safetensors")
    write_tokenizer(tmp_path, 50)
    model, tokenizer = tinystories.load(tmp_path)
    assert (tokenizer.get_vocab_size(), model.config.vocab_size) == (50, 61)
    factor = Factor(lambda texts: -2 * torch.arange(1.0, len(texts) + 1))
    potential = TextPotential([factor], tokenizer.decode_batch, torch.tensor([3]))
    assert potential.texts(torch.tensor([[60, 4], [4, 5]])) == ["w3 w4", "w3 w4 w5"]
    assert potential(torch.tensor([[60, 4], [4, 60], [4, 5]])).tolist() == [-2, -2, -4]


@pytest.fixture(scope="module", params=LOAD)
def genuine(request):
    """A role, and the paper's checkpoint of it in the cache of the Hub."""
    return request.param, RunConfig(preset="paper").checkpoint(OPTIONS[request.param])


@pytest.mark.hub
def test_the_genuine_weights(genuine):
    role, path = genuine
    assert parameters(role, path) == PARAMETERS[role]
    wanted = THEIRS[role].from_pretrained(path, dtype=torch.float32).eval()
    assert_same(role, path, wanted, 30, wanted.config.vocab_size)


@pytest.mark.hub
def test_the_genuine_tokenizers(genuine):
    role, path = genuine
    name, _, revision = getattr(PRESETS["paper"], OPTIONS[role]).partition("@")
    tokenizer, expected = LOAD[role](path)[1], AutoTokenizer.from_pretrained(name, revision=revision)
    for text in TEXTS:
        assert tokenizer.encode(text).ids == expected(text)["input_ids"]


@pytest.mark.hub
def test_the_base_toxicity_of_the_paper():
    config, generator = RunConfig(preset="paper"), torch.Generator().manual_seed(0)
    model, tokenizer = tinystories.load(config.checkpoint("lm"))
    score = toxicity.ToxicityScorer(*toxicity.load(config.checkpoint("toxicity_model")))
    prompt = torch.tensor(tokenizer.encode(config.prompt[0]).ids)
    assert len(prompt) == 8
    log_score, rows = TextPotential([Factor(score)], tokenizer.decode_batch, prompt), []
    with torch.inference_mode():
        for _ in range(20):
            decoder = Conditional(model, prompt, config.length).decoder(100)
            tokens = [torch.multinomial(decoder.logits.softmax(-1), 1, generator=generator)[:, 0]]
            while len(tokens) < config.length:
                decoder.extend(tokens[-1])
                tokens.append(torch.multinomial(decoder.logits.softmax(-1), 1, generator=generator)[:, 0])
            rows.append(torch.stack(tokens, 1))
    assert abs(log_score(torch.cat(rows)).exp().mean() - 0.010) < 0.005  # the paper's 0.010, some 3 sigma
