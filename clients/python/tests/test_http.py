"""The reader of answers, against peers that are not the daemon."""

import asyncio
import os
import random
import socket
import tempfile
import unittest

from sandboxd._async._client import AsyncClient
from sandboxd._sync._client import Client
from sandboxd.exceptions import (
    ConnectionException,
    NotFoundException,
    ProtocolException,
    SandboxException,
    TimeoutException,
)

from .support import Peer

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def both(path, **options):
    """Calls with either client, which must agree; returns the answer."""
    outcomes = []
    for call in (
        lambda: Client(path).call("GET", "v1", "x", **options),
        lambda: asyncio.run(AsyncClient(path).call("GET", "v1", "x", **options)),
    ):
        try:
            outcomes.append(call())
        except SandboxException as e:
            outcomes.append((type(e), str(e)))
    if outcomes[0] != outcomes[1]:
        raise AssertionError(f"the clients differ: {outcomes}")
    return outcomes[0]


class Answers(unittest.TestCase):
    def test_bodies(self):
        for answer in (
            OK + b'Content-Length: 7\r\n\r\n{"a":1}',
            OK + b'Transfer-Encoding: chunked\r\n\r\n3\r\n{"a\r\n4\r\n":1}\r\n0\r\n\r\n',
            OK + b'Transfer-Encoding: chunked\r\n\r\n7\r\n{"a":1}\r\n0\r\nTrailer: x\r\n\r\n',
            OK + b'\r\n{"a":1}',
        ):
            with self.subTest(answer), Peer(answer) as peer:
                self.assertEqual(both(peer.path), {"a": 1})

    def test_empty(self):
        with Peer(b"HTTP/1.1 204 No Content\r\n\r\n") as peer:
            self.assertEqual(both(peer.path), {})

    def test_broken(self):
        for answer, kind in (
            (b"", ConnectionException),
            (b"HTTP/1.1 200", ConnectionException),
            (b"HTTP/1.0 200 OK\r\n\r\n", ProtocolException),
            (b"HTTP/1.1 999 OK\r\n\r\n", ProtocolException),
            (b"HTTP/1.1 200 OK\n\n", ProtocolException),
            (OK + b"Content-Length: 7\r\n\r\n{", ConnectionException),
            (OK + b"Content-Length: -7\r\n\r\n{", ProtocolException),
            (OK + b"Content-Length: 7\r\nContent-Length: 7\r\n\r\n{}", ProtocolException),
            (OK + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}", ProtocolException),
            (OK + b"Transfer-Encoding: gzip\r\n\r\n{}", ProtocolException),
            (OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", ProtocolException),
            (OK + b"Transfer-Encoding: chunked\r\n\r\n2;x=1\r\n{}\r\n0\r\n\r\n", ProtocolException),
            (OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n", ProtocolException),
            (OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n", ConnectionException),
            (OK + b" folded: 1\r\n\r\n{}", ProtocolException),
            (OK + b"X: " + b"x" * 100_000, ProtocolException),
            (OK + b"X: y\r\n" * 100 + b"\r\n{}", ProtocolException),
            (OK + b"Content-Length: 2\r\n\r\n[]", ProtocolException),
            (OK + b"Content-Length: 2\r\n\r\n\xff\xff", ProtocolException),
            (OK + b"Content-Length: 200000\r\n\r\n" + b"[" * 200_000, ProtocolException),
            (b"HTTP/1.1 500 Oh\r\nContent-Type: text/html\r\n\r\n<p>", ProtocolException),
        ):
            with self.subTest(answer[:120]), Peer(answer) as peer:
                outcome = both(peer.path)
                self.assertEqual(outcome[0] if isinstance(outcome, tuple) else outcome, kind)

    def test_problem(self):
        body = b'{"code":"not_found","title":"x","status":404,"detail":"no such x","hint":"try y"}'
        head = b"HTTP/1.1 404 Not Found\r\nContent-Type: application/problem+json\r\n"
        with Peer(head + b"Content-Length: %d\r\n\r\n" % len(body) + body) as peer:
            self.assertEqual(both(peer.path), (NotFoundException, "no such x (try y)"))

    def test_no_daemon(self):
        kind, text = both("/nonexistent/api.sock")
        self.assertIs(kind, ConnectionException)
        self.assertIn("sandboxd serve", text)

    def test_request_timeout(self):
        with tempfile.TemporaryDirectory() as d, socket.socket(socket.AF_UNIX) as s:
            path = os.path.join(d, "s")
            s.bind(path)
            s.listen(2)
            self.assertEqual(both(path, request_timeout=0.05)[0], TimeoutException)


class Mutations(unittest.TestCase):
    """Mutated answers: whatever comes, the outcome is a value or an exception of the package."""

    SEEDS = (
        OK + b'Content-Length: 7\r\n\r\n{"a":1}',
        OK + b'Transfer-Encoding: chunked\r\n\r\n3\r\n{"a\r\n4\r\n":1}\r\n0\r\n\r\n',
        b"HTTP/1.1 404 Not Found\r\nContent-Type: application/problem+json\r\n\r\n"
        b'{"code":"not_found","detail":"x"}',
    )

    def test_heads(self):
        rng = random.Random(19)
        with Peer(b"") as peer:
            for _ in range(150):
                peer.answer = mutate(rng, rng.choice(self.SEEDS))
                with self.subTest(peer.answer):
                    both(peer.path)

    def test_streams(self):
        rng = random.Random(20)
        frames = b"\x03\x00\x00\x00\x09{\"pid\":7}\x01\x00\x00\x00\x03hi\n\x03\x00\x00\x00\x13{\"exit\":{\"code\":3}}"
        lines = b'{"a":1}\n{"b":"\xc3\xa9"}\n\n{"c":[]}\n'
        with Peer(b"") as peer:
            for _ in range(150):
                for name, body in (("frames", frames), ("lines", lines)):
                    peer.answer = b"HTTP/1.1 200 OK\r\n\r\n" + mutate(rng, body)
                    with self.subTest(peer.answer):
                        response = Client(peer.path).open("GET", "v1", "x")
                        try:
                            for _ in getattr(response, name)():
                                pass
                        except SandboxException:
                            pass
                        finally:
                            response.close()


def mutate(rng, data):
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            del out[at : at + rng.randint(1, 8)]
        elif kind == 1:
            out[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 4)))
        elif kind == 2 and at < len(out):
            out[at] = rng.randrange(256)
        else:
            out[at:at] = out[at : at + 12]
    return bytes(out)


async def upgraded(path):
    response = await AsyncClient(path).open("POST", "v1", "x", upgrade="tcp")
    reader, writer = response.detach()
    try:
        return await reader.read(100)
    finally:
        writer.close()
        await writer.wait_closed()


async def frames(path):
    response = await AsyncClient(path).open("GET", "v1", "x")
    try:
        return [f async for f in response.frames()]
    finally:
        response.close()


class Streams(unittest.TestCase):
    def test_frames_in_pieces(self):
        """A frame may come in any pieces of chunks."""
        frame = b"\x01\x00\x00\x00\x05h\xc3\xa9ll"
        chunks = b"".join(b"1\r\n%c\r\n" % b for b in frame) + b"0\r\n\r\n"
        with Peer(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks) as peer:
            self.assertEqual(asyncio.run(frames(peer.path)), [(1, "héll".encode())])

    def test_large_frame_is_refused(self):
        with Peer(b"HTTP/1.1 200 OK\r\n\r\n\x01\xff\xff\xff\xff") as peer:
            response = Client(peer.path).open("GET", "v1", "x")
            with self.assertRaises(ProtocolException):
                list(response.frames())
            response.close()

    def test_an_upgrade_leaves_the_peers_first_words(self):
        head = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
        with Peer(head + b"hello") as peer:
            with Client(peer.path).open("POST", "v1", "x", upgrade="tcp").detach() as conn:
                self.assertEqual(conn.recv(100), b"hello")
            reader = asyncio.run(upgraded(peer.path))
            self.assertEqual(reader, b"hello")

    def test_segments(self):
        for bad in ("", ".", ".."):
            with self.assertRaises(ProtocolException):
                Client("/nonexistent").call("GET", "v1", bad)
