"""A local server that answers as the Hub does: the commit of a revision, its files, their content.

Small files are named by git's sha1, weights by their sha256. A repository that is not published is
not found, an unknown revision neither; a test can declare a file gated.
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
    """Commits by repository and revision, files by commit; and which files were asked for."""

    def __init__(self, port: int):
        self.endpoint = f"http://127.0.0.1:{port}"
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
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
        paths = [path for method, path in map(str.split, self.requests) if method == "GET"]
        self.requests.clear()
        return {path.rsplit("/", 1)[1] for path in paths if "/resolve/" in path}


def digest(name: str, content: bytes) -> str:
    """The hash by which the Hub names a file."""
    if name.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def handler(hub: Hub) -> type[http.server.BaseHTTPRequestHandler]:
    """Requests answered from `hub`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments):
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

        def do_HEAD(self) -> None:
            """Answer a request for a commit, for its list of files or for one of them."""
            path = urlsplit(self.path).path
            hub.requests.append(f"{self.command} {path}")
            parts = path[1:].split("/")
            is_api = parts[:2] == ["api", "models"]
            if len(parts) < 5:
                return self.answer(404)
            owner, name, kind, revision, *file = parts[2:] if is_api else parts
            revisions = hub.revisions.get(f"{owner}/{name}")
            if revisions is None:
                return self.answer(404, X_Error_Code="RepoNotFound")
            commit = revisions.get(unquote(revision))
            if commit is None:
                return self.answer(404, X_Error_Code="RevisionNotFound")
            files = hub.files[commit]
            if kind == "revision":
                return self.answer(200, json.dumps({"id": name, "sha": commit}).encode())
            if kind == "tree":
                return self.answer(200, json.dumps([*map(entry, files.items())]).encode())
            if file[0] in hub.gated:
                return self.answer(403, X_Error_Code="GatedRepo")
            tag = f'"{digest(file[0], files[file[0]])}"'
            return self.answer(200, files[file[0]], ETag=tag, X_Repo_Commit=commit)

        do_GET = do_HEAD

    def entry(item: tuple[str, bytes]) -> dict:
        name, content = item
        found = {"type": "file", "path": name, "size": len(content), "oid": digest(name, content)}
        large = {"lfs": {"oid": found["oid"], "size": len(content), "pointerSize": 1}}
        return found | (large if name.endswith(LARGE) else {})

    return Handler


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    """A server on a free port of this machine."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), None) as server:
        hub = Hub(server.server_port)
        server.RequestHandlerClass = handler(hub)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
