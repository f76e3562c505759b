"""A local server that answers as the Hub does: the commit of a revision, its files, their content.

Small files are named by git's sha1, weights by their sha256. What is not published is not found; a
test can declare a file gated.
"""

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".bin")


class Hub:
    """Commits by repository and revision, files by commit; and the requests."""

    def __init__(self, port: int):
        self.endpoint = f"http://127.0.0.1:{port}"
        self.revisions: dict[str, dict[str, str]] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.requests: list[str] = []

    def publish(self, repository: str, commit: str, files: dict[str, bytes]) -> None:
        """Put a commit into a repository and move its main branch there."""
        self.revisions.setdefault(repository, {}).update({commit: commit, "main": commit})
        self.files[commit] = files

    def asked(self) -> set[str]:
        """The names of the files whose content was asked for, and forget the requests."""
        paths = [path for path in self.requests if path.startswith("GET ") and "/resolve/" in path]
        self.requests.clear()
        return {path.rsplit("/", 1)[1] for path in paths}


def entry(name: str, content: bytes) -> dict:
    """What the list of files says about one."""
    if name.endswith(LARGE):
        digest = hashlib.sha256(content).hexdigest()
        large = {"lfs": {"oid": digest, "size": len(content), "pointerSize": 1}}
    else:
        digest, large = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(), {}
    return {"type": "file", "path": name, "size": len(content), "oid": digest, **large}


class Handler(http.server.BaseHTTPRequestHandler):
    """Requests answered from the server's `hub`."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments) -> None:
        """Print nothing."""

    def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        """Status line, headers and, unless only these are asked for, content."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def do_GET(self) -> None:
        """A commit, its list of files or one of them."""
        hub, path = self.server.hub, urlsplit(self.path).path
        hub.requests.append(f"{self.command} {path}")
        parts = path.removeprefix("/api/models").split("/")[1:]
        if len(parts) < 4:
            return self.answer(404)
        revisions = hub.revisions.get("/".join(parts[:2]))
        if revisions is None:
            return self.answer(404, X_Error_Code="RepoNotFound")
        commit = revisions.get(unquote(parts[3]))
        if commit is None:
            return self.answer(404, X_Error_Code="RevisionNotFound")
        files = hub.files[commit]
        if parts[2] == "revision":
            return self.answer(200, json.dumps({"id": parts[1], "sha": commit}).encode())
        if parts[2] == "tree":
            return self.answer(200, json.dumps([entry(*item) for item in files.items()]).encode())
        if parts[4] in hub.gated:
            return self.answer(403, X_Error_Code="GatedRepo")
        content = files[parts[4]]
        tag = f'"{entry(parts[4], content)["oid"]}"'
        self.answer(200, content, ETag=tag, X_Repo_Commit=commit)

    do_HEAD = do_GET


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    """A server on a free port of this machine."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.hub = Hub(server.server_port)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.hub
        finally:
            server.shutdown()
            thread.join()
