# Written by hack/pyclient.py from package _async.
"""Requests to the daemon.

Every request has a connection of its own. On a Unix socket that costs some tens of microseconds;
in return no connection is ever stale, shared between threads or event loops, or inherited by a fork.
"""

from __future__ import annotations

import json
import time
from typing import Any, Iterator, Dict, List, Mapping, Optional, Tuple

from .. import _http
from .._address import default_socket
from ..exceptions import (
    ConnectionException,
    InvalidArgumentException,
    ProtocolException,
    SandboxException,
    from_problem,
)
from ._stream import Stream, read_source

JSON = "application/json"
NDJSON = "application/x-ndjson"
FRAMES = "application/vnd.sandboxd.stream"
BYTES = "application/octet-stream"
TAR = "application/x-tar"

_READ = 64 << 10


class Response:
    """An answer whose body is still to be read. Closing it before the end cuts the connection."""

    def __init__(self, stream: Stream, upgraded: bool = False) -> None:
        self._stream = stream
        # Of a connection that becomes the caller's no byte after the head may be taken.
        self._piece = 1 if upgraded else _READ
        self._buffer = bytearray()
        self._framing: Optional[_http.Framing] = None
        self._left = 0  # bytes that are left of the body, or of its current chunk
        self._begun = False  # a chunk was read before
        self._done = False
        self._body = bytearray()  # decoded bytes that were not taken yet
        self.status = 0
        self.headers: Dict[str, str] = {}

    def read_head(self, head_only: bool = False) -> None:
        self.status = _http.parse_status(self._line())
        headers: List[Tuple[str, str]] = []
        while True:
            line = self._line()
            if not line:
                break
            if len(headers) == _http.MAX_HEADERS:
                raise ProtocolException("read the answer: it has too many headers")
            headers.append(_http.parse_header(line))
        self.headers = dict(headers)
        self._framing = _http.Framing(self.status, headers, head_only)
        self._left = self._framing.length or 0

    @property
    def media_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    def _fill(self) -> bool:
        data = self._stream.recv(self._piece)
        self._buffer += data
        return bool(data)

    def _line(self) -> bytes:
        """Returns a line of the head or of the chunks, without its end."""
        start = 0
        while True:
            end = self._buffer.find(b"\n", start)
            if end >= 0:
                break
            start = len(self._buffer)
            if start > _http.MAX_LINE:
                raise ProtocolException("read the answer: a line of its head is too long")
            if not self._fill():
                raise ConnectionException("the daemon closed the connection before its answer")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        if not line.endswith(b"\r"):
            raise ProtocolException(f"read the answer: {line[:80]!r} has no proper line end")
        return line[:-1]

    def some(self, most: int = _READ) -> bytes:
        """Returns the next bytes of the body, and none at its end."""
        if self._body:
            out = bytes(self._body[:most])
            del self._body[:most]
            return out
        if self._done or self._framing is None:
            return b""
        if self._framing.chunked and self._left == 0:
            if self._begun and self._line():
                raise ProtocolException("read the answer: a chunk is longer than its size")
            self._begun = True
            self._left = _http.parse_chunk_size(self._line())
            if self._left == 0:
                while self._line():  # trailers
                    pass
                self._done = True
                return b""
        known = self._framing.chunked or self._framing.length is not None
        if known and self._left == 0:
            self._done = True
            return b""
        if not self._buffer and not self._fill():
            if known:
                raise ConnectionException("the daemon closed the connection within its answer")
            self._done = True
            return b""
        n = min(most, len(self._buffer))
        if known:
            n = min(n, self._left)
            self._left -= n
        out = bytes(self._buffer[:n])
        del self._buffer[:n]
        return out

    def exactly(self, n: int) -> bytes:
        """Returns n bytes of the body, or none if it ends before the first."""
        while len(self._body) < n:
            have = bytes(self._body)
            self._body.clear()
            data = self.some()
            self._body += have + data
            if not data:
                if self._body:
                    raise ConnectionException("the daemon ended its answer within a frame")
                return b""
        out = bytes(self._body[:n])
        del self._body[:n]
        return out

    def read(self, limit: int = _http.MAX_DOCUMENT) -> bytes:
        """Returns the rest of the body, and closes the answer."""
        try:
            parts: List[bytes] = []
            size = 0
            while True:
                data = self.some()
                if not data:
                    return b"".join(parts)
                size += len(data)
                if size > limit:
                    raise ProtocolException(f"read the answer: it exceeds {limit} bytes")
                parts.append(data)
        finally:
            self.close()

    def lines(self) -> Iterator[Dict[str, Any]]:
        """Yields the JSON documents of an answer of lines."""
        pending = bytearray()
        while True:
            data = self.some()
            if not data:
                break
            searched = len(pending)
            pending += data
            while True:
                end = pending.find(b"\n", searched)
                if end < 0:
                    break
                line = bytes(pending[:end])
                del pending[: end + 1]
                searched = 0
                if line.strip():
                    yield decode(line)
            if len(pending) > _http.MAX_DOCUMENT:
                raise ProtocolException("read the answer: a line is too long")
        if pending.strip():
            raise ConnectionException("the daemon ended its answer within a line")

    def frames(self) -> Iterator[Tuple[int, bytes]]:
        """Yields channel and payload of an answer of frames (docs/reference/frames.md)."""
        while True:
            head = self.exactly(5)
            if not head:
                return
            size = int.from_bytes(head[1:], "big")
            if size > 1 << 20:
                raise ProtocolException(f"read the answer: a frame of {size} bytes")
            payload = self.exactly(size) if size else b""
            if len(payload) != size:
                raise ConnectionException("the daemon ended its answer within a frame")
            yield head[0], payload

    def detach(self) -> Any:
        """Returns the connection after an upgrade."""
        if self.status != 101:
            raise ProtocolException(f"the daemon answered {self.status} to an upgrade")
        return self._stream.detach()

    def untimed(self) -> None:
        """Lifts the request's timeout from what is still to be read."""
        self._stream.deadline = None

    def close(self) -> None:
        self._stream.close()


def decode(text: bytes) -> Dict[str, Any]:
    """Decodes a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ProtocolException(f"read the answer: decode {text[:80]!r}: {e}") from e
    if not isinstance(value, dict):
        raise ProtocolException(f"read the answer: {text[:80]!r} is no object")
    return value


class Client:
    """The daemon behind a socket."""

    def __init__(self, socket: Optional[str] = None) -> None:
        self.socket = socket or default_socket()

    def open(
        self,
        method: str,
        *segments: str,
        query: _http.Query = (),
        body: Any = None,
        document: Optional[Mapping[str, Any]] = None,
        content_type: str = BYTES,
        accept: str = JSON,
        upgrade: Optional[str] = None,
        request_timeout: Optional[float] = None,
    ) -> Response:
        """Sends a request and returns the answer, whose body is not read.

        An answer that is an error is raised. ``body`` is bytes, text or a file-like object.
        """
        headers = {"Accept": accept}
        if upgrade:
            headers["Connection"], headers["Upgrade"] = "Upgrade", upgrade
        else:
            headers["Connection"] = "close"
        if document is not None:
            try:
                body = json.dumps(document, allow_nan=False).encode()
            except (TypeError, ValueError) as e:
                raise InvalidArgumentException(f"encode the request: {e}") from e
            content_type = JSON
        if isinstance(body, str):
            body = body.encode()
        if isinstance(body, (bytes, bytearray, memoryview)):
            body = bytes(body)
            headers["Content-Type"], headers["Content-Length"] = content_type, str(len(body))
        elif body is not None:
            if not hasattr(body, "read"):
                raise InvalidArgumentException(f"data cannot be a {type(body).__name__}")
            headers["Content-Type"], headers["Transfer-Encoding"] = content_type, "chunked"
        elif method in ("POST", "PUT"):
            headers["Content-Length"] = "0"
        deadline = None if not request_timeout else time.monotonic() + request_timeout
        head = _http.request_head(method, _http.path(*segments), query, headers)
        stream = Stream.open(self.socket, deadline)
        response = Response(stream, upgraded=upgrade is not None)
        try:
            broken: Optional[ConnectionException] = None
            try:
                self._send(stream, head, body)
            except ConnectionException as e:
                broken = e  # the daemon may have refused the request before all of it was sent
            try:
                response.read_head(head_only=method == "HEAD")
            except SandboxException:
                if broken is not None:
                    raise broken from None
                raise
            if response.status >= 400 or (broken is not None and response.status < 300):
                self._fail(response, broken)
            return response
        except BaseException:
            response.close()
            raise

    def _send(self, stream: Stream, head: bytes, body: Any) -> None:
        if body is None or isinstance(body, bytes):
            stream.send(head + (body or b""))
            return
        stream.send(head)
        while True:
            data = read_source(body, _READ)
            if not data:
                break
            stream.send(_http.chunk(data))
        stream.send(b"0\r\n\r\n")

    def _fail(self, response: Response, broken: Optional[Exception]) -> None:
        if response.status < 300 and broken is not None:
            raise broken
        text = response.read(1 << 20)
        if response.media_type not in ("application/problem+json", JSON):
            raise ProtocolException(f"the daemon answered {response.status}: {text[:200]!r}")
        raise from_problem(decode(text))

    def call(self, method: str, *segments: str, **options: Any) -> Dict[str, Any]:
        """Sends a request and returns the decoded answer, empty if there is none."""
        response = self.open(method, *segments, **options)
        text = response.read()
        return decode(text) if text else {}
