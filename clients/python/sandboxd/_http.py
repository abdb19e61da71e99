"""The parts of HTTP/1.1 that do no input or output: heads of requests and answers, sizes of chunks.

The reader is strict, because its only peer is the daemon: what RFC 9112 lets a recipient repair is
an error here.
"""

from __future__ import annotations

import re
from typing import Dict, List, Mapping, Optional, Sequence, Tuple
from urllib.parse import quote, urlencode

from .exceptions import ProtocolException

#: Maximum bytes of a line of a head, and number of its lines.
MAX_LINE = 16 << 10
MAX_HEADERS = 64
#: Maximum bytes of a JSON document or line: twice the daemon's largest, an exec with 16 MiB.
MAX_DOCUMENT = 320 << 20

_STATUS = re.compile(rb"HTTP/1\.1 ([1-5][0-9][0-9])(?: [\t\x20-\x7e\x80-\xff]*)?\Z")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*?)[ \t]*\Z")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})\Z")

Query = Sequence[Tuple[str, str]]


def path(*segments: str) -> str:
    """Joins segments to a path, each quoted as a whole."""
    for s in segments:
        if s in ("", ".", ".."):
            raise ProtocolException(f"{s!r} cannot be a segment of a request's path")
    return "/" + "/".join(quote(s, safe="") for s in segments)


def request_head(
    method: str, target: str, query: Query, headers: Mapping[str, str]
) -> bytes:
    """Returns the head of a request, its empty line included."""
    if query:
        target += "?" + urlencode(list(query), errors="surrogateescape")
    lines = [f"{method} {target} HTTP/1.1", "Host: sandboxd"]
    for name, value in headers.items():
        if "\r" in value or "\n" in value:
            raise ProtocolException(f"header {name}: has a line break")
        lines.append(f"{name}: {value}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


def parse_status(line: bytes) -> int:
    """Returns the status of an answer's first line."""
    m = _STATUS.match(line)
    if m is None:
        raise ProtocolException(f"read the answer: {line[:80]!r} is no status line")
    return int(m.group(1))


def parse_header(line: bytes) -> Tuple[str, str]:
    """Returns the lower-case name and the value of a header."""
    m = _HEADER.match(line)
    if m is None:
        raise ProtocolException(f"read the answer: {line[:80]!r} is no header")
    return m.group(1).decode("ascii").lower(), m.group(2).decode("latin-1")


def parse_chunk_size(line: bytes) -> int:
    """Returns the size of a chunk. The daemon sends no chunk extensions."""
    m = _CHUNK.match(line)
    if m is None:
        raise ProtocolException(f"read the answer: {line[:80]!r} is no size of a chunk")
    return int(m.group(1), 16)


class Framing:
    """How the end of a body is found: by its length, by chunks, or by the connection's end."""

    def __init__(self, status: int, headers: List[Tuple[str, str]], head_only: bool) -> None:
        self.chunked = False
        self.length: Optional[int] = None
        seen: Dict[str, str] = {}
        for name, value in headers:
            if name in ("content-length", "transfer-encoding"):
                if seen:
                    raise ProtocolException("read the answer: two headers tell its length")
                seen[name] = value
        if head_only or status < 200 or status in (204, 304):
            self.length = 0
        elif "transfer-encoding" in seen:
            if seen["transfer-encoding"].lower() != "chunked":
                raise ProtocolException(
                    f"read the answer: unknown transfer coding {seen['transfer-encoding'][:80]!r}"
                )
            self.chunked = True
        elif "content-length" in seen:
            text = seen["content-length"]
            if not (text.isascii() and text.isdigit() and len(text) < 20):
                raise ProtocolException(f"read the answer: {text[:80]!r} is no length")
            self.length = int(text)


def chunk(data: bytes) -> bytes:
    """Returns data as one chunk of a request's body."""
    return b"%x\r\n" % len(data) + data + b"\r\n"
