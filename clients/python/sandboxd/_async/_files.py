"""Files of a sandbox."""

from __future__ import annotations

import posixpath
from typing import Any, AsyncIterator, Dict, List, Literal, Mapping, Optional, Sequence, Tuple, overload

from .. import _requests
from ..exceptions import (
    FileNotFoundException,
    InvalidArgumentException,
    NotFoundException,
    SandboxException,
    SandboxNotFoundException,
    from_problem,
)
from ..models import EntryInfo, FilesystemEvent, WriteInfo
from ._client import BYTES, NDJSON, TAR, AsyncClient, AsyncResponse
from ._stream import Callback, Job, call


class AsyncWatchHandle:
    """A watch of a directory."""

    def __init__(
        self, response: AsyncResponse, root: str, on_event: Optional[Callback[FilesystemEvent]]
    ) -> None:
        self._response = response
        self._root = root
        self._on_event = on_event
        self._events: List[FilesystemEvent] = []
        self._stopped = False
        self._error: Optional[SandboxException] = None
        self._lines = response.lines()
        self._job: Optional[Job] = None

    async def start(self) -> None:
        """Waits until changes are reported."""
        async for event in self._lines:
            if event.get("error"):
                raise from_problem(event["error"])
            if event.get("kind") == "ready":
                break
        self._response.untimed()
        self._job = Job(self._read)

    async def _read(self) -> None:
        try:
            async for line in self._lines:
                if line.get("error"):
                    raise from_problem(line["error"])
                event = FilesystemEvent.of(line, self._root)
                if event is None:
                    continue
                if self._on_event is not None:
                    await call(self._on_event, event)
                else:
                    self._events.append(event)
        except SandboxException as e:
            if not self._stopped:
                self._error = e
        finally:
            self._response.close()

    async def get_new_events(self) -> List[FilesystemEvent]:
        """Returns the changes since the last call. Without ``on_event`` they are kept until then."""
        events = self._events[:]
        del self._events[: len(events)]
        if not events and self._error is not None:
            raise self._error
        return events

    async def stop(self) -> None:
        """Ends the watch."""
        self._stopped = True
        self._response.close()
        if self._job is not None:
            await self._job.join()


class AsyncFiles:
    """Files of a sandbox: ``sandbox.files``. Relative paths begin in the sandbox's directory."""

    def __init__(self, client: AsyncClient, sandbox_id: str, cwd: str) -> None:
        self._client = client
        self._id = sandbox_id
        self._cwd = cwd

    def _absolute(self, path: str) -> str:
        if not path:
            raise InvalidArgumentException("the path is empty")
        return path if path.startswith("/") else posixpath.join(self._cwd, path)

    async def _open(self, method: str, route: str, **options: Any) -> AsyncResponse:
        try:
            return await self._client.open(method, "v1", "sandboxes", self._id, route, **options)
        except SandboxNotFoundException:
            raise
        except NotFoundException as e:
            raise await self._missing(e) from None

    async def _call(self, method: str, route: str, **options: Any) -> Dict[str, Any]:
        try:
            return await self._client.call(method, "v1", "sandboxes", self._id, route, **options)
        except SandboxNotFoundException:
            raise
        except NotFoundException as e:
            raise await self._missing(e) from None

    async def _missing(self, e: NotFoundException) -> SandboxException:
        """Tells a missing file from a missing sandbox, which have one code."""
        try:
            await self._client.call("GET", "v1", "sandboxes", self._id)
        except NotFoundException as gone:
            return SandboxNotFoundException(str(gone), code=gone.code)
        except SandboxException:
            pass
        return FileNotFoundException(str(e), code=e.code)

    @overload
    async def read(
        self,
        path: str,
        format: Literal["text"] = "text",
        user: Optional[str] = None,
        request_timeout: Optional[float] = None,
    ) -> str: ...

    @overload
    async def read(
        self,
        path: str,
        format: Literal["bytes"],
        user: Optional[str] = None,
        request_timeout: Optional[float] = None,
    ) -> bytes: ...

    @overload
    async def read(
        self,
        path: str,
        format: Literal["stream"],
        user: Optional[str] = None,
        request_timeout: Optional[float] = None,
    ) -> AsyncIterator[bytes]: ...

    async def read(
        self,
        path: str,
        format: str = "text",
        user: Optional[str] = None,
        request_timeout: Optional[float] = None,
    ) -> Any:
        """Reads a file as "text" (UTF-8, invalid bytes replaced), "bytes", or "stream".

        A stream is an iterator of bytes. It raises if the daemon could not send all of the file.
        """
        if format not in ("text", "bytes", "stream"):
            raise InvalidArgumentException(f"format: {format!r} is none of text, bytes and stream")
        if user is not None:
            raise InvalidArgumentException("user: files are read with the rights of the sandbox's root")
        response = await self._open(
            "GET",
            "files",
            query=[("path", self._absolute(path))],
            accept=BYTES,
            request_timeout=request_timeout,
        )
        if format == "stream":
            return _pieces(response)
        data = await response.read(limit=1 << 40)
        return data if format == "bytes" else data.decode("utf-8", "replace")

    async def write(
        self,
        path: str,
        data: Any,
        user: Optional[str] = None,
        mode: Optional[int] = None,
        append: bool = False,
        request_timeout: Optional[float] = None,
    ) -> WriteInfo:
        """Writes text, bytes or a file-like object, and makes missing directories.

        The file appears whole or not at all, but for ``append``.
        """
        path = self._absolute(path)
        query = [("path", path)]
        if user is not None:
            query.append(("user", user))
        if mode is not None:
            query.append(("mode", f"{mode:04o}"))
        if append:
            query.append(("append", "true"))
        await self._call("PUT", "files", query=query, body=data, request_timeout=request_timeout)
        return WriteInfo(posixpath.basename(path), path)

    async def write_files(
        self,
        files: Sequence[Mapping[str, Any]],
        user: Optional[str] = None,
        request_timeout: Optional[float] = None,
    ) -> List[WriteInfo]:
        """Writes several files: ``[{"path": …, "data": …}]``."""
        for f in files:
            if "path" not in f or "data" not in f:
                raise InvalidArgumentException("files: each needs a path and data")
        out = []
        for f in files:
            out.append(await self.write(f["path"], f["data"], user=user, request_timeout=request_timeout))
        return out

    async def list(
        self, path: str = ".", depth: int = 1, request_timeout: Optional[float] = None
    ) -> List[EntryInfo]:
        """Lists a directory, and depth-1 levels below it, sorted by path."""
        if depth < 1:
            raise InvalidArgumentException(f"depth: {depth} is less than 1")
        response = await self._open(
            "GET",
            "list",
            query=[("path", posixpath.normpath(self._absolute(path))), ("depth", str(depth))],
            accept=NDJSON,
            request_timeout=request_timeout,
        )
        out: List[EntryInfo] = []
        try:
            async for line in response.lines():
                if line.get("error"):
                    raise from_problem(line["error"])
                if line.get("entry"):
                    out.append(EntryInfo.of(line["entry"]))
                if line.get("done"):
                    if line.get("more"):
                        raise SandboxException(f"list {path}: there are too many entries, or one is too deep")
                    return sorted(out, key=lambda e: e.path)
        finally:
            response.close()
        raise SandboxException("the daemon sent an incomplete list")

    async def get_info(self, path: str, request_timeout: Optional[float] = None) -> EntryInfo:
        """Describes a file. A link is described itself."""
        answer = await self._call(
            "GET", "stat", query=[("path", self._absolute(path))], request_timeout=request_timeout
        )
        return EntryInfo.of(answer)

    async def exists(self, path: str, request_timeout: Optional[float] = None) -> bool:
        """Reports whether a file exists. A link that leads nowhere exists."""
        try:
            await self.get_info(path, request_timeout)
        except FileNotFoundException:
            return False
        return True

    async def make_dir(
        self, path: str, user: Optional[str] = None, request_timeout: Optional[float] = None
    ) -> bool:
        """Makes a directory and its parents. Returns False if it exists."""
        path = posixpath.normpath(self._absolute(path))
        try:
            if (await self.get_info(path, request_timeout)).type.value == "dir":
                return False
        except FileNotFoundException:
            pass
        document: Dict[str, Any] = {**_requests.path_field("path", path), "parents": True}
        if user is not None:
            document["user"] = user
        await self._call("POST", "mkdir", document=document, request_timeout=request_timeout)
        return True

    async def rename(
        self,
        old_path: str,
        new_path: str,
        overwrite: bool = True,
        request_timeout: Optional[float] = None,
    ) -> EntryInfo:
        """Moves a file or directory, over a file that is at the new path."""
        new_path = self._absolute(new_path)
        document: Dict[str, Any] = {
            **_requests.path_field("from", self._absolute(old_path)),
            **_requests.path_field("to", new_path),
        }
        if overwrite:
            document["overwrite"] = True
        await self._call("POST", "move", document=document, request_timeout=request_timeout)
        return await self.get_info(new_path, request_timeout)

    async def remove(self, path: str, request_timeout: Optional[float] = None) -> None:
        """Removes a file, or a directory with all below it. A missing one is an error."""
        await self._call(
            "DELETE",
            "files",
            query=[("path", self._absolute(path)), ("recursive", "true")],
            request_timeout=request_timeout,
        )

    async def watch_dir(
        self,
        path: str,
        on_event: Optional[Callback[FilesystemEvent]] = None,
        recursive: bool = False,
        request_timeout: Optional[float] = None,
    ) -> AsyncWatchHandle:
        """Watches a directory, with recursive also those below it.

        Changes after the return are reported: to ``on_event``, else by ``get_new_events``.
        """
        root = posixpath.normpath(self._absolute(path))
        query = [("path", root)]
        if recursive:
            query.append(("recursive", "true"))
        response = await self._open(
            "GET", "watch", query=query, accept=NDJSON, request_timeout=request_timeout
        )
        handle = AsyncWatchHandle(response, root, on_event)
        try:
            await handle.start()
        except BaseException:
            response.close()
            raise
        return handle

    async def read_archive(self, path: str, request_timeout: Optional[float] = None) -> bytes:
        """Returns a tar of a file or directory, with names relative to it.

        The sandbox controls its content: extract it with a filter, such as tarfile's "data".
        """
        response = await self._open(
            "GET",
            "archive",
            query=[("path", self._absolute(path))],
            accept=TAR,
            request_timeout=request_timeout,
        )
        return await response.read(limit=1 << 40)

    async def write_archive(
        self, path: str, data: Any, owners: bool = False, request_timeout: Optional[float] = None
    ) -> None:
        """Extracts a tar below a directory, which is made. With owners, files keep the tar's."""
        query: List[Tuple[str, str]] = [("path", self._absolute(path))]
        if owners:
            query.append(("owners", "true"))
        await self._call(
            "PUT", "archive", query=query, body=data, content_type=TAR, request_timeout=request_timeout
        )


async def _pieces(response: AsyncResponse) -> AsyncIterator[bytes]:
    try:
        while True:
            data = await response.some()
            if not data:
                return
            yield data
    finally:
        response.close()


