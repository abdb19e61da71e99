"""Connections to the daemon's socket, and what else differs between asyncio and threads."""

from __future__ import annotations

import asyncio
import inspect
import time
from typing import Any, Awaitable, Callable, Optional, Tuple, TypeVar, Union

from ..exceptions import ConnectionException, InvalidArgumentException, TimeoutException

T = TypeVar("T")
Lock = asyncio.Lock


class Stream:
    """One connection. Every wait on it ends at its deadline, a time of time.monotonic()."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        deadline: Optional[float],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self.deadline = deadline

    @classmethod
    async def open(cls, path: str, deadline: Optional[float]) -> "Stream":
        try:
            reader, writer = await bounded(
                asyncio.open_unix_connection(path, limit=1 << 20), deadline
            )
        except OSError as e:
            raise not_running(path, e) from e
        return cls(reader, writer, deadline)

    async def recv(self, n: int) -> bytes:
        try:
            return await bounded(self._reader.read(n), self.deadline)
        except OSError as e:
            raise ConnectionException(f"read the daemon's answer: {e}") from e

    async def send(self, data: bytes) -> None:
        try:
            self._writer.write(data)
            await bounded(self._writer.drain(), self.deadline)
        except OSError as e:
            raise ConnectionException(f"send the request: {e}") from e

    def close(self) -> None:
        # abort, because a close would first wait until the peer has read what is buffered.
        try:
            self._writer.transport.abort()
        except RuntimeError:
            pass  # the event loop is closed, and has closed the socket

    def detach(self) -> Tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Hands the connection over to the caller."""
        return self._reader, self._writer


async def bounded(awaitable: Awaitable[T], deadline: Optional[float]) -> T:
    """Awaits until the deadline."""
    if deadline is None:
        return await awaitable
    try:
        return await asyncio.wait_for(awaitable, max(0.0, deadline - time.monotonic()))
    except asyncio.TimeoutError:
        raise TimeoutException("the request ran into its request_timeout") from None


def not_running(path: str, e: OSError) -> ConnectionException:
    return ConnectionException(
        f"connect to the daemon at {path}: {e.strerror or e}",
        hint="start one with: sandboxd serve; another socket is named by socket= or SANDBOXD_SOCKET",
    )


async def call(function: Optional[Callable[..., Any]], *args: Any) -> None:
    """Calls a callback, which may be a coroutine function."""
    if function is not None:
        result = function(*args)
        if inspect.isawaitable(result):
            await result


async def read_source(source: Any, n: int) -> bytes:
    """Reads from a file-like object, whose read may be a coroutine function."""
    data = source.read(n)
    if inspect.isawaitable(data):
        data = await data
    if isinstance(data, str):
        return data.encode()
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise InvalidArgumentException(f"a file's read returned {type(data).__name__}")
    return bytes(data)


class Job:
    """A function that runs beside its starter."""

    def __init__(self, function: Callable[[], Awaitable[None]]) -> None:
        self._task: "asyncio.Task[None]" = asyncio.ensure_future(_run(function))
        # Errors are the joiner's; a job that no caller joins has nobody to tell.
        self._task.add_done_callback(lambda t: t.cancelled() or t.exception())

    async def join(self) -> None:
        """Waits for its end, and raises what it raised."""
        await asyncio.shield(self._task)


async def _run(function: Callable[[], Awaitable[None]]) -> None:
    await function()


Callback = Union[Callable[[T], Any], Callable[[T], Awaitable[Any]]]
