"""Connections to the daemon's socket, and what else differs between asyncio and threads."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any, Callable, Optional, TypeVar

from ..exceptions import ConnectionException, InvalidArgumentException, TimeoutException

T = TypeVar("T")
Lock = threading.Lock


class Stream:
    """One connection. Every wait on it ends at its deadline, a time of time.monotonic()."""

    def __init__(self, sock: socket.socket, deadline: Optional[float]) -> None:
        self._socket = sock
        self.deadline = deadline

    @classmethod
    def open(cls, path: str, deadline: Optional[float]) -> "Stream":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _bound(sock, deadline)
            sock.connect(path)
        except socket.timeout:
            sock.close()
            raise TimeoutException("the request ran into its request_timeout") from None
        except OSError as e:
            sock.close()
            raise not_running(path, e) from e
        except BaseException:
            sock.close()
            raise
        return cls(sock, deadline)

    def recv(self, n: int) -> bytes:
        try:
            _bound(self._socket, self.deadline)
            return self._socket.recv(n)
        except socket.timeout:
            raise TimeoutException("the request ran into its request_timeout") from None
        except OSError as e:
            raise ConnectionException(f"read the daemon's answer: {e}") from e

    def send(self, data: bytes) -> None:
        try:
            view = memoryview(data)
            while view:
                _bound(self._socket, self.deadline)
                view = view[self._socket.send(view) :]
        except socket.timeout:
            raise TimeoutException("the request ran into its request_timeout") from None
        except OSError as e:
            raise ConnectionException(f"send the request: {e}") from e

    def close(self) -> None:
        # A shutdown first: it wakes a thread that waits in recv, which a close does not.
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer has closed it, or close was called before
        self._socket.close()

    def detach(self) -> socket.socket:
        """Hands the connection over to the caller."""
        self._socket.settimeout(None)
        return self._socket


def _bound(sock: socket.socket, deadline: Optional[float]) -> None:
    if deadline is None:
        sock.settimeout(None)  # an earlier deadline may have been lifted
        return
    left = deadline - time.monotonic()
    if left <= 0:
        raise socket.timeout()
    sock.settimeout(left)


def not_running(path: str, e: OSError) -> ConnectionException:
    return ConnectionException(
        f"connect to the daemon at {path}: {e.strerror or e}",
        hint="start one with: sandboxd serve; another socket is named by socket= or SANDBOXD_SOCKET",
    )


def call(function: Optional[Callable[..., Any]], *args: Any) -> None:
    """Calls a callback."""
    if function is not None:
        function(*args)


def read_source(source: Any, n: int) -> bytes:
    """Reads from a file-like object."""
    data = source.read(n)
    if isinstance(data, str):
        return data.encode()
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise InvalidArgumentException(f"a file's read returned {type(data).__name__}")
    return bytes(data)


class Job:
    """A function that runs beside its starter."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._error: Optional[BaseException] = None
        self._thread = threading.Thread(target=self._run, name="sandboxd", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._function()
        except BaseException as e:  # raised again by join
            self._error = e

    def join(self) -> None:
        """Waits for its end, and raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error


Callback = Callable[[T], Any]
