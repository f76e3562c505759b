"""What a server may do while a file is fetched from it: no more than it has declared, in a time that this allows for.

    declared     bytes that the last HEAD has named             time since then <= PATIENCE + declared / SLOWEST
    a body       at most declared + SLACK bytes, as they are: what unpacks itself could become anything
    an ETag      one plain word: huggingface_hub makes a file name of it

Whatever else it does is an OSError, which names what was wrong.
"""

import re
import time
from collections.abc import Iterator

import httpx2
from huggingface_hub.utils._http import default_client_factory  # what set_client_factory is to be given again

from tinystories.errors import printable

PATIENCE = 60.0  # seconds
SLOWEST = 50_000  # bytes a second
SLACK = 2**20  # bytes, for what is not declared: errors in words
LARGEST = 2**36  # bytes of one file
ETAG = re.compile(r'(?:W/)?"?[\w+=-][\w.+=-]*"?', re.ASCII)


class Watch:
    """Watches one file that is fetched, over all answers of the server."""

    def __init__(self):
        self.declare(0)

    def declare(self, size: int) -> None:
        """The clock starts, and with it how much may arrive."""
        self.most, self.end = size + SLACK, time.monotonic() + PATIENCE + size / SLOWEST

    def client(self) -> httpx2.Client:
        """A client as huggingface_hub makes its own, every answer watched."""
        client = default_client_factory()
        hooks = client.event_hooks
        client.event_hooks = {"request": [*hooks["request"], unpacked], "response": [*hooks["response"], self.look]}
        return client

    def look(self, response: httpx2.Response) -> None:
        """At the headers now, at the body as it arrives."""
        headers = response.headers
        for name in [name for name, value in headers.items() if not value.isprintable()]:
            headers[name] = printable(headers[name])  # the progress bar and errors show some of them
        if response.request.method == "HEAD":
            for name in ("ETag", "X-Linked-ETag"):
                if not ETAG.fullmatch(headers.get(name, "none")):
                    raise OSError(f"the server's {name} {headers[name]!r} is no hash")
            stated = headers.get("X-Linked-Size") or headers.get("Content-Length") or "0"
            if not stated.isdecimal() or len(stated) > 20 or int(stated) > LARGEST:
                raise OSError(f"the server declares {stated!r} bytes")
            self.declare(int(stated))
        elif headers.get("Content-Encoding", "identity") != "identity":
            raise OSError("the server packs it, unasked")
        response.stream = Body(response.stream, self)


class Body(httpx2.SyncByteStream):
    """The bytes of an answer, counted and timed as they arrive."""

    def __init__(self, stream: httpx2.SyncByteStream, watch: Watch):
        self.stream, self.watch = stream, watch

    def __iter__(self) -> Iterator[bytes]:
        arrived = 0
        for part in self.stream:
            arrived += len(part)
            if arrived > self.watch.most:
                raise OSError("the server sends more than it has declared")
            if time.monotonic() > self.watch.end:
                raise OSError("the server is too slow")
            yield part

    def close(self) -> None:
        """Release the connection."""
        self.stream.close()


def unpacked(request: httpx2.Request) -> None:
    """Ask for the bytes as they are."""
    request.headers["Accept-Encoding"] = "identity"
