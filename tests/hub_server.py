"""A local server that answers as the Hub does when files are fetched: HEAD, GET of /owner/name/resolve/revision/file.

Small files are served directly, named by git's sha1; weights by a redirect to another host, named by their sha256. A
test asks for faults by file name.
"""

import contextlib
import hashlib
import http.server
import threading
import time
from collections.abc import Iterator

ELSEWHERE = "../../../../escaped"
LARGE = (".safetensors", ".bin")
STATUS = {  # fault -> status and the Hub's word for it
    "no repository": (404, "RepoNotFound"),
    "unauthorised": (401, "RepoNotFound"),
    "no revision": (404, "RevisionNotFound"),
    "gated": (403, "GatedRepo"),
    "down": (503, None),
}


class Hub:
    """What the server holds: commits by repository and revision, files by commit; and what it was asked."""

    def __init__(self, port: int):
        self.endpoint, self.elsewhere = f"http://127.0.0.1:{port}", f"http://localhost:{port}"
        self.revisions: dict[str, dict[str, str]] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.faults: dict[str, str] = {}
        self.requests: list[str] = []

    def publish(self, repository: str, commit: str, files: dict[str, bytes]) -> None:
        """Put a commit into a repository and move its main branch there."""
        self.revisions.setdefault(repository, {}).update({commit: commit, "main": commit})
        self.files[commit] = files

    def asked(self) -> set[str]:
        """The names of the files whose content was asked for, and forget the requests."""
        names = {path.rsplit("/", 1)[1] for method, path in map(str.split, self.requests) if method == "GET"}
        self.requests.clear()
        return names


def handler(hub: Hub) -> type[http.server.BaseHTTPRequestHandler]:
    """Requests answered from `hub`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments):
            """Keep the log off the screen."""

        def head(self, status: int, length: int = 0, **headers: str) -> None:
            """Status line and headers."""
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(length))
            self.end_headers()

        def refuse(self, status: int, word: str | None, **headers: str) -> None:
            """An error, in the Hub's words."""
            self.head(status, **({"X_Error_Code": word} if word else {}), **headers)

        def resolve(self) -> None:
            """Metadata, and the content of a small file, or where a large one is."""
            owner, name, _, revision, file = self.path[1:].split("/")
            commit = hub.revisions.get(f"{owner}/{name}", {}).get(revision)
            fault = hub.faults.get(file, "no repository" if f"{owner}/{name}" not in hub.revisions else None)
            fault = fault or ("no revision" if commit is None else None)
            if fault == "hostile":
                return self.refuse(418, None, X_Error_Message="\x9b2Jerror: forged")
            if fault in STATUS:
                return self.refuse(*STATUS[fault])
            content = hub.files[commit].get(file)
            if content is None:
                return self.refuse(404, "EntryNotFound", X_Repo_Commit=commit)
            if file.endswith(LARGE):
                digest = ELSEWHERE if fault == "named outside" else hashlib.sha256(content).hexdigest()
                linked = {"X_Linked_Etag": f'"{digest}"', "X_Linked_Size": str(len(content))}
                return self.head(302, Location=f"{hub.elsewhere}/{commit}/{file}", X_Repo_Commit=commit, **linked)
            digest = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            digest = ELSEWHERE if fault == "named outside" else digest
            self.head(200, len(content), ETag=f'"{digest}"', X_Repo_Commit=commit)
            if self.command == "GET":
                self.wfile.write(spoilt(content) if fault == "altered" else content)

        def deliver(self) -> None:
            """The content of a large file, or what a fault makes of it."""
            _, commit, file = self.path.split("/")
            content, fault = hub.files[commit][file], hub.faults.get(file)
            start = int(self.headers.get("Range", "bytes=0-")[6:-1])
            rest = (spoilt(content) if fault == "altered" else content)[start:]
            whole = f"bytes {start}-{len(content) - 1}/{len(content)}"
            short = rest[: len(rest) // 2]
            if fault == "short":
                return self.head(200, len(short)) or self.wfile.write(short)
            if fault in ("endless", "slow", "packed"):
                return self.never_end(fault)
            self.head(206 if start else 200, len(rest), **({"Content_Range": whole} if start else {}))
            if fault == "cut":
                self.close_connection = True
                return self.wfile.write(short)
            self.wfile.write(rest)

        def never_end(self, fault: str) -> None:
            """Bytes for as long as somebody reads them: as fast as they come, one at a time, or said to be packed."""
            packed = {"Content_Encoding": "gzip"} if fault == "packed" else {}
            self.head(200, 10**12, **packed)
            self.close_connection = True
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b"\0" if fault == "slow" else bytes(2**16))
                    time.sleep(0.05 if fault == "slow" else 0)

        def do_HEAD(self) -> None:
            """Answer; what is no file of a repository is not there and is not counted."""
            found = self.path.count("/") == 5 and self.path.split("/")[3] == "resolve"
            if not found and self.path.split("/")[1] not in hub.files:
                return self.refuse(404, None)
            hub.requests.append(f"{self.command} {self.path}")
            self.resolve() if found else self.deliver()

        do_GET = do_HEAD

    return Handler


def spoilt(content: bytes) -> bytes:
    """The same length with the last byte changed."""
    return content[:-1] + bytes([content[-1] ^ 1])


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
