"""Checkpoints by name: what is fetched from a local server that answers as the Hub does."""

import http.server
import json
import re
import threading

import pytest
from huggingface_hub import constants

from eval.options import POCKET, PRESETS
from tinystories.load import checkpoint_directory, load_model

NAME, COMMIT = PRESETS["paper"]["lm"].split("@")


class Hub(http.server.BaseHTTPRequestHandler):
    """One repository: its files by name, and which of them were fetched."""

    files: dict[str, bytes]
    fetched: list[str]

    def do_GET(self) -> None:
        path, content, headers = self.path.partition("?")[0], None, {}
        if path == f"/api/models/{NAME}/revision/main":
            content = json.dumps({"id": NAME, "sha": COMMIT}).encode()
        elif path == f"/api/models/{NAME}/tree/{COMMIT}":
            sizes = [(name, len(data)) for name, data in self.files.items()]
            rows = [{"type": "file", "path": n, "size": size, "oid": n} for n, size in sizes]
            content = json.dumps(rows).encode()
        elif path.startswith(start := f"/{NAME}/resolve/{COMMIT}/"):
            name = path.removeprefix(start)
            self.fetched.append(name)
            content, headers = self.files[name], {"ETag": name, "X-Repo-Commit": COMMIT}
        self.send_response(404 if content is None else 200)
        headers["Content-Length"] = str(len(content or b""))
        for header in headers.items():
            self.send_header(*header)
        self.end_headers()
        if content and self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server with the shipped language model and files that nobody asked for."""
    files = {path.name: path.read_bytes() for path in (POCKET / "lm").iterdir()}
    files |= {"training_args.bin": b"no", "onnx/model.safetensors": b"no"}
    handler = type("Handler", (Hub,), {"files": files, "fetched": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    checkpoint_directory.cache_clear()
    yield handler
    server.shutdown()
    server.server_close()
    checkpoint_directory.cache_clear()  # else a later test of this worker finds these


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_only_what_is_read_is_fetched_and_once(hub, weights):
    hub.files[weights] = hub.files.pop("model.safetensors")
    hub.files.setdefault("pytorch_model.bin", b"no")  # safetensors are preferred
    path = checkpoint_directory(f"{NAME}@{COMMIT}", "--lm")
    wanted = {"config.json", weights, "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in path.iterdir()} == wanted == set(hub.fetched)
    before = len(hub.fetched)
    assert checkpoint_directory(f"{NAME}@{COMMIT}", "--lm") == path and len(hub.fetched) == before


def test_a_model_comes_from_the_branch_main_if_no_revision_is_named(hub):
    model, _ = load_model(NAME, "--lm", "Once", 3)
    assert checkpoint_directory(NAME, "--lm").name == COMMIT and model.vocab_size == 4096


@pytest.mark.parametrize("name", ["nowhere", "owner/none@main"])
def test_a_name_of_nothing_is_one_line(hub, name):
    with pytest.raises(ValueError, match=rf"^--lm {re.escape(name)}: no such directory, .*give"):
        checkpoint_directory(name, "--lm")
