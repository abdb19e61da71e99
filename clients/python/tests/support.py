"""What tests share. They speak to the daemon of SANDBOXD_SOCKET: tests/pyclient starts one."""

import asyncio
import functools
import os
import socket
import tempfile
import threading

from sandboxd import Sandbox

#: Seconds after which a test that waits for an event has failed (testenv.HungAfter).
HUNG = 540


def image():
    """Returns the image of tests, or None for the host's."""
    return os.environ.get("SANDBOXD_TEST_IMAGE") or None


def fresh(**options):
    """Returns a sandbox that ends with the test program at the latest."""
    return Sandbox.create(tie=True, image=image(), **options)


def timed_out(kind, run, timeout=0.5):
    """Calls run with a timeout, whose exception of this kind it returns.

    How long a program takes to its first word is not judged: a timeout that was too short for it is doubled.
    """
    while True:
        try:
            run(timeout)
        except kind as e:
            if e.stdout or timeout > HUNG:
                return e, timeout
        else:
            raise AssertionError("it has ended before its timeout")
        timeout *= 2


def asynchronous(method):
    """Runs a coroutine of a test."""

    @functools.wraps(method)
    def run(self):
        asyncio.run(asyncio.wait_for(method(self), HUNG))

    return run


class Peer:
    """A Unix socket that answers every connection with the same bytes, and closes it."""

    def __init__(self, answer):
        self._directory = tempfile.TemporaryDirectory()
        self.path = os.path.join(self._directory.name, "s")
        self.answer = answer
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(64)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        while True:
            try:
                conn, _ = self._listener.accept()
            except OSError:
                return
            with conn:
                try:
                    conn.recv(65536)
                    conn.sendall(self.answer)
                    conn.shutdown(socket.SHUT_WR)
                    conn.recv(65536)  # until the client closes: a reset could overtake the answer
                except OSError:
                    pass

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        self._directory.cleanup()
