"""Checkpoints by name: fetched from a server that speaks as the Hub does, kept, used offline; what can go wrong."""

import errno
import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx2
import pytest
import torch
from hub_server import Hub, serving
from safetensors.torch import save
from test_gpt_neo import SHAPES, theirs
from test_layouts import write_vocabulary

import tinystories
from eval.run.options import POCKET, PRESETS
from tinystories import InputError, hub
from tinystories.checkpoint import fingerprint, read_tensors
from tinystories.hub import checkpoint_directory
from tinystories.vocabulary import read_vocabulary

ROOT = Path(__file__).parent.parent
COMMIT, LATER = "a" * 40, "b" * 40
NAME = "owner/stories"
EXTRA = {"README.md": b"# Stories", "optimizer.pt": b"no", "tf_model.h5": b"no", "training_args.bin": b"no"}
FAR = "http://127.0.0.1:9"  # a port that nothing listens on


@pytest.fixture(scope="module")
def server():
    """One server for all tests of this file."""
    with serving() as running:
        yield running


@pytest.fixture
def remote(server, tmp_path, monkeypatch) -> Hub:
    """The server, empty, as the Hub of huggingface_hub, with an empty cache."""
    for record in (server.revisions, server.files, server.faults, server.requests):
        record.clear()
    go_to(monkeypatch, server.endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    return server


def go_to(monkeypatch, endpoint: str) -> None:
    """Point huggingface_hub to another server and forget what this process has fetched."""
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    hub.fetch.cache_clear()


def go_offline(monkeypatch) -> None:
    """Set HF_HUB_OFFLINE."""
    go_to(monkeypatch, FAR)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A small checkpoint written by transformers, its head stored beside the embedding that it is tied to."""
    path = tmp_path_factory.mktemp("original")
    theirs(path, **SHAPES[1])
    return path


def contents(
    original: Path, layout: str, scale: float = 1.0, names: tuple[str, ...] = ("config.json", "tokenizer.json")
) -> dict[str, bytes]:
    """The files of a repository that holds the checkpoint in a layout, and others that nobody needs."""
    files = {name: (original / name).read_bytes() for name in names}
    names = sorted(tensors := {name: scale * t for name, t in read_tensors(original / "model.safetensors").items()})
    if layout.startswith("bin"):
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
        names.append("lm_head.weight")
    halves = [names] if "sharded" not in layout else [names[::2], names[1::2]]
    kind = ("pytorch_model", "bin") if layout.startswith("bin") else ("model", "safetensors")
    places = {}
    for number, half in enumerate(halves, 1):
        file = f"{kind[0]}-{number:05}-of-{len(halves):05}.{kind[1]}" if len(halves) > 1 else ".".join(kind)
        places |= dict.fromkeys(half, file)
        part = {name: tensors[name] for name in half}
        files[file] = pickled(part) if kind[1] == "bin" else save(part, {"format": "pt"})
    if len(halves) > 1:
        files[".".join(kind) + ".index.json"] = json.dumps({"metadata": {}, "weight_map": places}).encode()
    return files


def pickled(value) -> bytes:
    """What torch.save writes."""
    torch.save(value, buffer := io.BytesIO())
    return buffer.getvalue()


def refusal(name: str = NAME) -> str:
    """The one line with which a name is refused."""
    with pytest.raises(InputError) as caught:
        checkpoint_directory(name, "--lm")
    message = str(caught.value)
    assert "\n" not in message and name in message and "--lm" in message
    return message


def stored(path: Path, name: str) -> list[Path]:
    """Files of this name in the cache, and whatever is half fetched."""
    return [*path.rglob(name), *path.rglob("*.incomplete")]


LAYOUTS = ["safetensors", "safetensors sharded", "bin", "bin sharded"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_what_is_needed_is_fetched_and_the_cache_is_reused(remote, original, layout, monkeypatch, capfd):
    files = contents(original, layout)
    remote.publish(NAME, COMMIT, files | EXTRA)
    first = checkpoint_directory(f"{NAME}@{COMMIT}", "--lm")
    assert remote.asked() == files.keys()
    assert "".join(capfd.readouterr()) == "", "no progress bar and no chatter where there is no terminal"
    ids = torch.arange(20)[None]
    model, tokenizer = tinystories.load(first)
    expected, _ = tinystories.load(original)
    assert torch.equal(model(ids), expected(ids)) and tokenizer.encode("w3 w60").ids == [3, 60]
    written = {path: path.stat().st_mtime_ns for path in first.iterdir()}
    go_to(monkeypatch, FAR)
    assert checkpoint_directory(f"{NAME}@{COMMIT}", "--lm") == first
    go_offline(monkeypatch)
    assert checkpoint_directory(f"{NAME}@{COMMIT}", "--lm") == first
    assert not remote.requests and written == {path: path.stat().st_mtime_ns for path in first.iterdir()}


class Terminal(io.StringIO):
    """Standard error on a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_the_progress_bar(remote, original, monkeypatch):
    remote.publish(NAME, COMMIT, contents(original, "safetensors"))
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    checkpoint_directory(NAME, "--lm")
    assert "model.safetensors: 100%" in terminal.getvalue()


@pytest.mark.parametrize("layout", ["safetensors", "bin"])
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_repository_without_tokenizer_json(remote, original, tmp_path, layout, kind):
    write_vocabulary(tmp_path, kind)
    small = {"vocab_size": len((tmp_path / "vocab.txt").read_text().splitlines()) if kind == "bert" else 300}
    theirs(tmp_path / "lm", **SHAPES[1], **small)
    (tmp_path / "lm" / "tokenizer.json").unlink()
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    weights = contents(tmp_path / "lm", layout, names=("config.json",))
    remote.publish(NAME, COMMIT, files | weights | EXTRA)
    path = checkpoint_directory(NAME, "--lm")
    assert remote.asked() == files.keys() | weights.keys()
    _, tokenizer = tinystories.load(path)
    assert tokenizer.encode("a cat").ids == read_vocabulary(tmp_path, 300).encode("a cat").ids


def test_a_branch_is_asked_for_once_and_may_move(remote, original, monkeypatch):
    remote.publish(NAME, COMMIT, contents(original, "bin"))
    first = checkpoint_directory(NAME, "--lm")
    remote.requests.clear()
    remote.publish(NAME, LATER, contents(original, "bin", scale=2))
    assert checkpoint_directory(NAME, "--lm") == first and not remote.requests, "one process sees one commit"
    go_offline(monkeypatch)
    assert checkpoint_directory(NAME, "--lm") == first
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    go_to(monkeypatch, remote.endpoint)
    moved = checkpoint_directory(NAME, "--lm")
    assert moved != first and fingerprint(moved) != fingerprint(first)
    assert torch.equal(tinystories.load(moved)[0].wte.weight, 2 * tinystories.load(first)[0].wte.weight)
    go_to(monkeypatch, FAR)
    assert checkpoint_directory(NAME, "--lm") == moved, "a Hub that cannot be reached leaves the branch where it was"


def test_large_files_come_by_a_redirect_to_another_host(remote, original):
    remote.publish(NAME, COMMIT, contents(original, "safetensors"))
    checkpoint_directory(NAME, "--lm")
    assert f"GET /{COMMIT}/model.safetensors" in remote.requests
    assert f"GET /{NAME}/resolve/{COMMIT}/model.safetensors" not in remote.requests


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize(
    ("file", "fault", "words"),
    [
        ("model.safetensors", "short", "should be of size"),
        ("model.safetensors", "cut", "could not be fetched (RemoteProtocolError"),
        ("model.safetensors", "altered", "another hash"),
        ("tokenizer.json", "altered", "another hash"),
        ("model.safetensors", "down", "503"),
        ("model.safetensors", "named outside", "X-Linked-ETag '\"../../../../escaped\"' is no hash"),
        ("tokenizer.json", "named outside", "ETag '\"../../../../escaped\"' is no hash"),
        ("model.safetensors", "endless", "the server sends more than it has declared"),
        ("model.safetensors", "slow", "the server is too slow"),
        ("model.safetensors", "packed", "the server packs it, unasked"),
    ],
)
def test_damaged_downloads_leave_nothing_and_a_second_try_works(
    remote, original, tmp_path, monkeypatch, file, fault, words, links, capfd
):
    if fault == "slow":
        monkeypatch.setattr("tinystories.transfer.PATIENCE", 0.3)
    else:
        monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_SYMLINKS", not links)
    remote.publish(NAME, COMMIT, contents(original, "safetensors"))
    remote.faults[file] = fault
    message = refusal()
    assert file in message and words in message and "hf download owner/stories" in message
    assert (
        not stored(tmp_path / "cache", file)
        and not list(tmp_path.parent.rglob("escaped*"))
        and "".join(capfd.readouterr()) == ""
    )
    assert len([path for path in tmp_path.rglob("blobs/*") if path.is_file()]) <= 2
    remote.faults.clear()
    model, _ = tinystories.load(checkpoint_directory(NAME, "--lm"))
    assert torch.equal(model.wte.weight, tinystories.load(original)[0].wte.weight)


@pytest.mark.parametrize(
    ("file", "fault", "words"),
    [
        ("config.json", "no repository", "not found at http://127.0.0.1"),
        ("config.json", "unauthorised", "hf auth login"),
        ("config.json", "gated", "its owner lets in"),
        ("config.json", "no revision", "no revision main"),
        ("config.json", "down", "503"),
        ("model.safetensors", "gated", "its owner lets in"),
        ("config.json", "hostile", r"could not be fetched"),
        ("config.json", None, "it holds no config.json"),
        ("tokenizer.json", None, "it holds no tokenizer.json"),
        ("model.safetensors", None, "it holds no model.safetensors"),
    ],
)
def test_what_the_hub_refuses_or_lacks_is_said_in_one_line(remote, original, monkeypatch, file, fault, words):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    files = contents(original, "safetensors")
    remote.publish(NAME, COMMIT, {name: files[name] for name in files if fault or name != file})
    remote.faults |= {file: fault} if fault else {}
    message = refusal()
    assert words in message and "no such directory" in message
    assert "run `hf download owner/stories --exclude '*/*' --local-dir DIR`" in message


def test_a_file_missing_from_a_sharded_repository_is_named(remote, original):
    files = contents(original, "safetensors sharded")
    del files["model-00002-of-00002.safetensors"]
    remote.publish(NAME, COMMIT, files)
    assert "it holds no model-00002-of-00002.safetensors" in refusal()


@pytest.mark.parametrize("place", ["../secret.safetensors", "/etc/hostname", "..", 3, "", "..\\..\\x", "\x1b[2Jx"])
def test_an_index_that_points_elsewhere_is_refused(remote, original, place):
    files = contents(original, "safetensors")
    del files["model.safetensors"]
    files["model.safetensors.index.json"] = json.dumps({"weight_map": {"wte.weight": place}}).encode()
    remote.publish(NAME, COMMIT, files)
    with pytest.raises(InputError, match=r"model\.safetensors\.index\.json: .*restore the file"):
        checkpoint_directory(NAME, "--lm")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (httpx2.ReadTimeout("timed out"), "could not be fetched (ReadTimeout: timed out)"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device): make room there or set HF_HOME"),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied): make room there or set HF_HOME"),
        (RuntimeError("first line\nsecond line"), "(RuntimeError: first line)"),
    ],
)
def test_a_slow_network_and_a_full_disk(remote, original, monkeypatch, error, words):
    def fail(*arguments, **options):
        raise error

    remote.publish(NAME, COMMIT, contents(original, "safetensors"))
    monkeypatch.setattr(hub, "hf_hub_download", fail)
    assert words in refusal()


@pytest.mark.parametrize("name", ["no/such/place", "nothing", "a--b/c", "owner/name.git", "x" * 5000, "owner/name@"])
def test_names_that_cannot_be_repositories_ask_nobody(remote, name):
    assert "no such directory, and no name of a Hub repository" in refusal(name)
    assert not remote.requests


def test_the_two_readings_of_a_name_that_is_neither(remote):
    message = refusal("no/such")
    assert "--lm no/such: no such directory, and as a Hub repository not found at" in message


def test_a_directory_goes_before_a_repository_and_a_file_is_no_directory(remote, original, tmp_path, monkeypatch):
    remote.publish(NAME, COMMIT, contents(original, "safetensors"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    (tmp_path / "owner" / "file").write_text("")
    assert checkpoint_directory(NAME, "--lm") == Path(NAME) and not remote.requests
    assert "is a file" in refusal("owner/file")


def test_a_revision_that_is_named(remote, original):
    remote.publish(NAME, COMMIT, contents(original, "safetensors"))
    remote.revisions[NAME]["refs%2Fpr%2F1"] = COMMIT
    remote.revisions[NAME]["v1.0"] = COMMIT
    for revision in ("v1.0", "refs/pr/1", COMMIT):
        assert checkpoint_directory(f"{NAME}@{revision}", "--lm").name == COMMIT
    message = refusal(f"{NAME}@{LATER}")
    assert f"it has no revision {LATER}" in message and f"hf download {NAME} --revision {LATER} " in message


def test_offline_and_absent(remote, monkeypatch):
    go_offline(monkeypatch)
    assert "config.json is not in the cache while HF_HUB_OFFLINE is set" in refusal()


def test_offline_with_half_a_checkpoint(remote, original, monkeypatch):
    files = contents(original, "safetensors")
    remote.publish(NAME, COMMIT, files)
    remote.faults["model.safetensors"] = "altered"
    refusal()
    go_offline(monkeypatch)
    assert "model.safetensors is not in the cache while HF_HUB_OFFLINE is set" in refusal()


class Trap:
    """Unpickled without care, it makes a directory."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "how", ["trap", "trap among tensors", "list", "numbers", "truncated", "garbage", "meta", "quantised"]
)
def test_no_pickle_is_executed(remote, original, tmp_path, how, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    trap, files = Trap(tmp_path / "sprung"), contents(original, "bin")
    whole = files["pytorch_model.bin"]
    files["pytorch_model.bin"] = {
        "trap": lambda: pickled(trap),
        "trap among tensors": lambda: pickled({"wte.weight": torch.ones(2), "more": trap}),
        "list": lambda: pickled([torch.ones(2)]),
        "numbers": lambda: pickled({"wte.weight": 1.0}),
        "truncated": lambda: whole[: len(whole) // 2],
        "garbage": lambda: b"\x80\x02garbage",
        "meta": lambda: pickled({"wte.weight": torch.ones(2, device="meta")}),
        "quantised": lambda: pickled({"wte.weight": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)}),
    }[how]()
    remote.publish(NAME, COMMIT, files)
    with pytest.raises(InputError, match=r"pytorch_model\.bin: .*use"):
        checkpoint_directory(NAME, "--lm")
    assert not (tmp_path / "sprung").exists() and not (tmp_path / "assets").exists()
    torch.load(io.BytesIO(pickled(trap)), weights_only=False)
    assert (tmp_path / "sprung").exists(), "the trap works"


def deflated(content: bytes) -> bytes:
    """A zip archive with the same entries, packed."""
    with zipfile.ZipFile(io.BytesIO(content)) as stored, zipfile.ZipFile(buffer := io.BytesIO(), "w") as packed:
        for entry in stored.infolist():
            packed.writestr(entry.filename, stored.read(entry), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda: deflated(pickled({"wte.weight": torch.zeros(2**20)})), "it is compressed"),
        (
            lambda: pickled({"wte.weight": torch.zeros(1).expand(10**6, 10**6)}),
            "smaller than the tensors that it names",
        ),
        (lambda: pickled(dict.fromkeys("abc", torch.zeros(2**20))), "smaller than the tensors that it names"),
    ],
)
def test_a_small_file_asks_for_no_large_memory(remote, original, tmp_path, content, words):
    remote.publish(NAME, COMMIT, contents(original, "bin") | {"pytorch_model.bin": content()})
    with pytest.raises(InputError, match=words):
        checkpoint_directory(NAME, "--lm")
    assert not (tmp_path / "assets").exists()


def test_the_paper_preset_end_to_end(remote, tmp_path):
    """main.py in a process of its own, the three repositories of the paper filled with the pocket networks."""
    preset = PRESETS["paper"]
    for name, role in ((preset.lm, "lm"), (preset.toxicity_model, "toxicity"), (preset.similarity_model, "similarity")):
        repository, _, commit = name.partition("@")
        assert len(commit) == 40
        remote.publish(repository, commit, {path.name: path.read_bytes() for path in (POCKET / role).iterdir()})
    small = "--generations 0 --pool-rounds 1 --pool-base-draws 10 --pool-draws 10 --pool-updates 2"
    sizes = "--eval-runs 2 --eval-particles 4 --eval-base-samples 20 --beta 0.1 --eval-target-proposals 60 --length 6"
    run = subprocess.run(
        [sys.executable, "main.py", "--preset", "paper", "--out", tmp_path / "run", *small.split(), *sizes.split()],
        env=os.environ | {"HF_ENDPOINT": remote.endpoint, "HF_HOME": str(tmp_path / "home")},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert remote.asked() == {"config.json", "tokenizer.json", "model.safetensors"}
    assert not any(word in run.stderr for word in ("http", "safetensors", "Warning")), run.stderr
    key = json.loads((tmp_path / "run" / "target" / "target.json").read_text())["key"]
    assert (key["lm"], key["toxicity"]) == (fingerprint(POCKET / "lm"), fingerprint(POCKET / "toxicity"))
