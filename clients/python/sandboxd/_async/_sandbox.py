"""Sandboxes, in the shape of E2B's SDK."""

from __future__ import annotations

import datetime
import os
from typing import Any, AsyncIterator, Dict, List, Mapping, Optional, Sequence, Type, TypeVar, Union, overload

from .. import _requests
from .._variant import class_method_variant
from ..exceptions import (
    ConflictException,
    InvalidArgumentException,
    NotFoundException,
    ProtocolException,
    SandboxNotFoundException,
    from_problem,
)
from ..models import (
    OWN_LABELS,
    Context,
    EntryInfo,
    Envs,
    Execution,
    ExecutionError,
    FileType,
    Language,
    OutputMessage,
    Result,
    SandboxInfo,
    SandboxQuery,
    SandboxState,
    SnapshotInfo,
    _clean,
    env_list,
)
from ._client import NDJSON, AsyncClient, AsyncResponse
from ._code import DEFAULT_CODE_TIMEOUT, AsyncCode
from ._commands import AsyncCommands, AsyncPty
from ._files import AsyncFiles
from ._stream import Callback

Self = TypeVar("Self", bound="AsyncSandbox")


class AsyncSandboxPaginator:
    """A list of sandboxes, newest first. Iterating yields all of them."""

    def __init__(self, client: AsyncClient, query: SandboxQuery, limit: Optional[int]) -> None:
        if limit is not None and limit < 1:
            raise InvalidArgumentException(f"limit: {limit} is less than 1")
        self._client = client
        self._query = query
        self._limit = limit
        self._left: Optional[List[SandboxInfo]] = None

    @property
    def has_next(self) -> bool:
        """Whether next_items has more."""
        return self._left is None or bool(self._left)

    async def next_items(self) -> List[SandboxInfo]:
        """Returns the next ``limit`` sandboxes."""
        if self._left is None:
            labels = [("label", f"{k}={v}") for k, v in (self._query.metadata or {}).items()]
            answer = await self._client.call("GET", "v1", "sandboxes", query=labels)
            found = [SandboxInfo.of(d) for d in answer.get("sandboxes") or []]
            states = [SandboxState(s) for s in self._query.state or []]
            self._left = [i for i in reversed(found) if not states or i.state in states]
        n = self._limit or len(self._left)
        items, self._left = self._left[:n], self._left[n:]
        return items

    async def __aiter__(self) -> AsyncIterator[SandboxInfo]:
        while self.has_next:
            for item in await self.next_items():
                yield item


class AsyncSandbox:
    """A sandbox. ``create`` makes one, ``connect`` finds one.

    As a context manager it deletes the sandbox at its end.
    """

    def __init__(
        self, client: AsyncClient, info: SandboxInfo, tie: Optional[AsyncResponse] = None
    ) -> None:
        """Is called by create and connect."""
        self._client = client
        self._tie = tie
        self._code = AsyncCode(client, info.sandbox_id)
        self._cwd = str(info.raw.get("cwd") or "/")
        self.sandbox_id = info.sandbox_id
        self.name = info.name
        self.commands = AsyncCommands(client, info.sandbox_id)
        self.files = AsyncFiles(client, info.sandbox_id, self._cwd)
        self.pty = AsyncPty(client, info.sandbox_id)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.sandbox_id}>"

    async def __aenter__(self: Self) -> Self:
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._kill()

    # Life

    @classmethod
    async def create(
        cls: Type[Self],
        template: Optional[str] = None,
        timeout: Optional[float] = None,
        metadata: Optional[Mapping[str, str]] = None,
        envs: Optional[Envs] = None,
        *,
        image: Optional[str] = None,
        snapshot: Optional[str] = None,
        network: _requests.NetworkOption = None,
        allow_internet_access: Optional[bool] = None,
        limits: Optional[Mapping[str, Any]] = None,
        ports: Optional[Sequence[_requests.PortOption]] = None,
        name: Optional[str] = None,
        user: Optional[str] = None,
        cwd: Optional[str] = None,
        profile: Optional[str] = None,
        idle_timeout: Optional[float] = None,
        auto_remove: bool = True,
        tie: bool = False,
        settings: Optional[Mapping[str, Any]] = None,
        socket: Optional[str] = None,
        request_timeout: Optional[float] = None,
    ) -> Self:
        """Creates a sandbox, which runs when this returns.

        ``image`` is a reference, or "host", the default. ``template`` is the name of a snapshot, or
        an image. ``timeout`` is its life in seconds, used or not; without one it has the daemon's
        default, an hour, or less if it is idle. At its end it is removed, unless ``auto_remove`` is
        off; then its files stay.

        ``network`` is "none", the default, "full", or a document of the API. ``limits`` has
        ``memory`` (a number or "512m"), ``cpus``, ``pids``, ``disk`` and others of the API.
        ``settings`` are further fields of the API's request.

        With ``tie`` the sandbox is deleted when this process ends, however it does.
        """
        client = AsyncClient(socket)
        if template is not None:
            if image is not None or snapshot is not None:
                raise InvalidArgumentException("template, image and snapshot: give one of them")
            image, snapshot = await cls._template(client, template)
        body = _requests.creation(
            image=image,
            snapshot=snapshot,
            timeout=timeout,
            idle_timeout=idle_timeout,
            metadata=metadata,
            envs=envs,
            network_option=network,
            allow_internet_access=allow_internet_access,
            limits_option=limits,
            ports=ports,
            name=name,
            user=user,
            cwd=cwd,
            profile=profile,
            auto_remove=auto_remove,
            settings=settings,
        )
        if not tie:
            answer = await client.call(
                "POST", "v1", "sandboxes", document=body, request_timeout=request_timeout
            )
            return cls(client, SandboxInfo.of(answer))
        response = await client.open(
            "POST",
            "v1",
            "sandboxes",
            query=[("tie", "true")],
            document=body,
            accept=NDJSON,
            request_timeout=request_timeout,
        )
        try:
            async for line in response.lines():
                if line.get("code"):
                    raise from_problem(line)
                response.untimed()
                return cls(client, SandboxInfo.of(line), response)
            raise ProtocolException("the daemon answered without a sandbox")
        except BaseException:
            response.close()
            raise

    @staticmethod
    async def _template(client: AsyncClient, template: str) -> Any:
        """Returns image and snapshot that a template's name stands for."""
        if "/" not in template and ":" not in template:
            try:
                found = await client.call("GET", "v1", "snapshots", template)
                return None, str(found["id"])
            except NotFoundException:
                pass
        return template, None

    @overload  # type: ignore[misc] # a method, and a static one
    async def connect(self: Self, timeout: Optional[float] = None) -> Self: ...

    @overload
    @staticmethod
    async def connect(
        sandbox_id: str, timeout: Optional[float] = None, *, socket: Optional[str] = None
    ) -> "AsyncSandbox": ...

    @class_method_variant("_cls_connect")
    async def connect(self, timeout: Optional[float] = None) -> Any:
        """Finds a sandbox by its id or name, and resumes a paused one.

        ``timeout`` extends its life, and never shortens it.
        """
        found = await type(self)._cls_connect(self.sandbox_id, timeout, socket=self._client.socket)
        found._tie = self._tie
        return found

    @classmethod
    async def _cls_connect(
        cls: Type[Self],
        sandbox_id: str,
        timeout: Optional[float] = None,
        *,
        socket: Optional[str] = None,
    ) -> Self:
        client = AsyncClient(socket)
        info = await _info(client, sandbox_id)
        if info.state is SandboxState.PAUSED:
            await _change(client, sandbox_id, "resume")
        elif info.state is not SandboxState.RUNNING:
            raise ConflictException(
                f"connect to sandbox {sandbox_id}: it is {info.state.value}",
                code="conflict",
                hint="start it with start()",
            )
        sandbox = cls(client, info)
        if timeout is not None:
            left = 0.0
            if info.end_at is not None:
                now = datetime.datetime.now(datetime.timezone.utc)
                left = (info.end_at - now).total_seconds()
            if timeout > left:
                await _set_timeout(client, sandbox_id, timeout)
        return sandbox

    @classmethod
    def list(
        cls,
        query: Optional[SandboxQuery] = None,
        limit: Optional[int] = None,
        *,
        socket: Optional[str] = None,
    ) -> AsyncSandboxPaginator:
        """Lists sandboxes, newest first: by ``next_items``, or by iterating."""
        return AsyncSandboxPaginator(AsyncClient(socket), query or SandboxQuery(), limit)

    @overload  # type: ignore[misc] # a method, and a static one
    async def kill(self) -> bool: ...

    @overload
    @staticmethod
    async def kill(sandbox_id: str, *, socket: Optional[str] = None) -> bool: ...

    @class_method_variant("_cls_kill")
    async def kill(self) -> Any:
        """Deletes the sandbox with its files. Returns False if it does not exist."""
        return await self._kill()

    async def _kill(self) -> bool:
        try:
            return await self._cls_kill(self.sandbox_id, socket=self._client.socket)
        finally:
            if self._tie is not None:
                self._tie.close()
                self._tie = None

    @classmethod
    async def _cls_kill(cls, sandbox_id: str, *, socket: Optional[str] = None) -> bool:
        try:
            await AsyncClient(socket).call("DELETE", "v1", "sandboxes", sandbox_id)
        except NotFoundException:
            return False
        return True

    @overload  # type: ignore[misc] # a method, and a static one
    async def set_timeout(self, timeout: float) -> None: ...

    @overload
    @staticmethod
    async def set_timeout(sandbox_id: str, timeout: float, *, socket: Optional[str] = None) -> None: ...

    @class_method_variant("_cls_set_timeout")
    async def set_timeout(self, timeout: float) -> Any:
        """Sets the sandbox's life: seconds from now. A shorter idle timeout is raised to it."""
        await _set_timeout(self._client, self.sandbox_id, timeout)

    @classmethod
    async def _cls_set_timeout(
        cls, sandbox_id: str, timeout: float, *, socket: Optional[str] = None
    ) -> None:
        await _set_timeout(AsyncClient(socket), sandbox_id, timeout)

    @overload  # type: ignore[misc] # a method, and a static one
    async def get_info(self) -> SandboxInfo: ...

    @overload
    @staticmethod
    async def get_info(sandbox_id: str, *, socket: Optional[str] = None) -> SandboxInfo: ...

    @class_method_variant("_cls_get_info")
    async def get_info(self) -> Any:
        """Describes the sandbox: state, deadline, metadata, and what is enforced."""
        return await _info(self._client, self.sandbox_id)

    @classmethod
    async def _cls_get_info(cls, sandbox_id: str, *, socket: Optional[str] = None) -> SandboxInfo:
        return await _info(AsyncClient(socket), sandbox_id)

    async def is_running(self) -> bool:
        """Reports whether the sandbox runs. A paused one does not."""
        try:
            return (await _info(self._client, self.sandbox_id)).state is SandboxState.RUNNING
        except NotFoundException:
            return False

    @overload  # type: ignore[misc] # a method, and a static one
    async def pause(self) -> bool: ...

    @overload
    @staticmethod
    async def pause(sandbox_id: str, *, socket: Optional[str] = None) -> bool: ...

    @class_method_variant("_cls_pause")
    async def pause(self) -> Any:
        """Freezes every process. Returns False if the sandbox is paused already."""
        return await _pause(self._client, self.sandbox_id)

    @classmethod
    async def _cls_pause(cls, sandbox_id: str, *, socket: Optional[str] = None) -> bool:
        return await _pause(AsyncClient(socket), sandbox_id)

    @overload  # type: ignore[misc] # a method, and a static one
    async def resume(self) -> None: ...

    @overload
    @staticmethod
    async def resume(sandbox_id: str, *, socket: Optional[str] = None) -> None: ...

    @class_method_variant("_cls_resume")
    async def resume(self) -> Any:
        """Thaws a paused sandbox."""
        await _change(self._client, self.sandbox_id, "resume")

    @classmethod
    async def _cls_resume(cls, sandbox_id: str, *, socket: Optional[str] = None) -> None:
        await _change(AsyncClient(socket), sandbox_id, "resume")

    async def stop(self, grace: Optional[float] = None) -> None:
        """Ends what runs and keeps the files, unless the sandbox is removed at its end."""
        document = {} if grace is None else {"grace": grace}
        await self._client.call("POST", "v1", "sandboxes", self.sandbox_id, "stop", document=document)

    async def start(self, timeout: Optional[float] = None) -> None:
        """Runs a stopped or lost sandbox again, with its files."""
        document = {} if timeout is None else {"timeout": timeout}
        await self._client.call("POST", "v1", "sandboxes", self.sandbox_id, "start", document=document)

    # Copies

    async def fork(
        self: Self,
        count: int = 1,
        timeout: Optional[float] = None,
        envs: Optional[Envs] = None,
        metadata: Optional[Mapping[str, str]] = None,
        names: Optional[Sequence[str]] = None,
    ) -> List[Self]:
        """Creates sandboxes with this one's files, all or none. Processes are not copied.

        A fork is stopped at its deadline, and not removed.
        """
        contexts = {}  # of this sandbox; its forks get others
        labels = (await _info(self._client, self.sandbox_id)).raw.get("labels") or {}
        for key in labels:
            if key.startswith(OWN_LABELS):
                contexts[key] = ""
        body = _clean(
            {
                "count": count,
                "timeout": timeout,
                "idle_timeout": timeout if timeout and timeout > 0 else None,
                "env": env_list(envs),
                "labels": {**contexts, **(metadata or {})},
                "names": list(names or []),
            }
        )
        answer = await self._client.call(
            "POST", "v1", "sandboxes", self.sandbox_id, "fork", document=body
        )
        return [type(self)(self._client, SandboxInfo.of(d)) for d in answer.get("sandboxes") or []]

    async def create_snapshot(
        self, name: Optional[str] = None, metadata: Optional[Mapping[str, str]] = None
    ) -> SnapshotInfo:
        """Keeps the sandbox's files: ``Sandbox.create(snapshot=info.snapshot_id)`` begins with them."""
        body = _clean({"name": name, "labels": dict(metadata or {})})
        return SnapshotInfo.of(
            await self._client.call("POST", "v1", "sandboxes", self.sandbox_id, "snapshots", document=body)
        )

    async def snapshot(self, name: Optional[str] = None) -> SnapshotInfo:
        """Is create_snapshot."""
        return await self.create_snapshot(name)

    async def rollback(self, snapshot_id: str) -> None:
        """Replaces the files by a snapshot's. Every process ends."""
        await self._client.call(
            "POST", "v1", "sandboxes", self.sandbox_id, "rollback", document={"snapshot": snapshot_id}
        )

    @classmethod
    async def list_snapshots(
        cls, sandbox_id: Optional[str] = None, *, socket: Optional[str] = None
    ) -> List[SnapshotInfo]:
        """Lists snapshots, of one sandbox or all, oldest first."""
        segments = ("sandboxes", sandbox_id, "snapshots") if sandbox_id else ("snapshots",)
        answer = await AsyncClient(socket).call("GET", "v1", *segments)
        return [SnapshotInfo.of(d) for d in answer.get("snapshots") or []]

    @classmethod
    async def delete_snapshot(cls, snapshot_id: str, *, socket: Optional[str] = None) -> bool:
        """Removes a snapshot. Returns False if it does not exist."""
        try:
            await AsyncClient(socket).call("DELETE", "v1", "snapshots", snapshot_id)
        except NotFoundException:
            return False
        return True

    # Names of the E2B-like server's SDK

    async def close(self) -> bool:
        """Is kill."""
        return await self._kill()

    async def upload_file(self, source: Any, path: Optional[str] = None) -> str:
        """Writes a file of this machine, or a file-like object, to path; returns the path there.

        Without path it gets its own name, in the sandbox's directory.
        """
        if isinstance(source, (str, os.PathLike)):
            with open(source, "rb") as f:
                return (await self.files.write(path or os.path.basename(source), f)).path
        if path is None:
            raise InvalidArgumentException("path: a file without a name needs one")
        return (await self.files.write(path, source)).path

    async def download_file(self, path: str, destination: Optional[str] = None) -> bytes:
        """Reads a file, and writes it to a destination on this machine, if there is one."""
        data = await self.files.read(path, format="bytes")
        if destination is not None:
            with open(destination, "wb") as f:
                f.write(data)
        return data

    async def list_files(self, path: str = ".") -> List[EntryInfo]:
        """Lists the files in a directory and below."""
        entries = await self.files.list(path, depth=64)
        return [e for e in entries if e.type is FileType.FILE]

    # Network, counters

    async def update_network(self, network: _requests.NetworkOption) -> None:
        """Replaces mode and policy of a sandbox that has a network."""
        document = {"network": _requests.network(network, None) or {}}
        await self._client.call("PATCH", "v1", "sandboxes", self.sandbox_id, document=document)

    async def get_host(self, port: int) -> str:
        """Returns "ADDRESS:PORT" of the host at which a port of the sandbox is published.

        It was asked for by ``create(ports=[port], network=…)``. ``open_port`` needs neither.
        """
        info = await _info(self._client, self.sandbox_id)
        for p in info.raw.get("ports") or []:
            if p.get("port") == port and p.get("protocol", "tcp") == "tcp" and p.get("host_port"):
                address = str(p.get("address") or "127.0.0.1")
                return f"[{address}]:{p['host_port']}" if ":" in address else f"{address}:{p['host_port']}"
        raise InvalidArgumentException(
            f"port {port} of the sandbox is not published",
            hint=f"create(ports=[{port}], network=…) publishes it; open_port({port}) needs no publication",
        )

    async def open_port(self, port: int) -> Any:
        """Connects to a server that listens in the sandbox, which needs a network.

        Returns a connected socket.socket, or with AsyncSandbox asyncio's (reader, writer).
        """
        response = await self._client.open(
            "POST", "v1", "sandboxes", self.sandbox_id, "ports", str(port), upgrade="tcp"
        )
        try:
            return response.detach()
        except BaseException:
            response.close()
            raise

    async def get_metrics(self) -> Dict[str, Any]:
        """Returns what the kernel counts: memory, cpu, pids, io, pressure."""
        return await self._client.call("GET", "v1", "sandboxes", self.sandbox_id, "stats")

    # Code

    async def run_code(
        self,
        code: str,
        language: Optional[str] = None,
        context: Union[Context, str, None] = None,
        on_stdout: Optional[Callback[OutputMessage]] = None,
        on_stderr: Optional[Callback[OutputMessage]] = None,
        on_result: Optional[Callback[Result]] = None,
        on_error: Optional[Callback[ExecutionError]] = None,
        envs: Optional[Envs] = None,
        timeout: Optional[float] = DEFAULT_CODE_TIMEOUT,
        libraries: Optional[Sequence[str]] = None,
        library_dir: Optional[str] = None,
        output_dir: Optional[str] = None,
        stateless: bool = False,
        request_timeout: Optional[float] = None,
        **more: Any,
    ) -> Execution:
        """Runs code, in Python by default, and returns results, output and error.

        Variables are kept between runs, in a context of the sandbox for each language, or in
        ``context``. Languages without contexts, and ``stateless``, run code in a process of its
        own. That also takes ``args``, ``stdin``, ``cwd`` and ``user``.

        ``policy`` is the text of a code policy that judges the code beside the daemon's own; with
        ``check=True`` nothing runs. Refused code raises CodeRefusedException.
        The files that it writes into ``output_dir`` are ``Execution.artifacts``.

        An exception of the code is ``Execution.error``. After ``timeout`` seconds the code is ended
        and TimeoutException raised; 0 means no end but the sandbox's.
        """
        if library_dir is not None:
            more["library_dir"] = library_dir
        if output_dir is not None:
            more["output_dir"] = output_dir
        if "stdin" in more:
            more["stdin"] = _requests.stdin(more["stdin"])
        return await self._code.run(
            code,
            language,
            context,
            stateless,
            on_stdout,
            on_stderr,
            on_result,
            on_error,
            envs,
            timeout,
            libraries,
            more,
            request_timeout,
        )

    async def install(
        self,
        *libraries: str,
        language: str = "python",
        library_dir: Optional[str] = None,
        timeout: Optional[float] = 600,
    ) -> None:
        """Installs libraries of a language. LibraryException has the package manager's output.

        They come over the sandbox's network, or from packages in its directory ``library_dir``.
        """
        await self._code.install(libraries, language, library_dir, timeout)

    async def create_code_context(
        self,
        cwd: Optional[str] = None,
        language: Optional[str] = None,
        envs: Optional[Envs] = None,
        user: Optional[str] = None,
        memory: Optional[int] = None,
        idle_timeout: Optional[float] = None,
        request_timeout: Optional[float] = None,
    ) -> Context:
        """Creates a process that keeps the variables of the code that runs in it."""
        return await self._code.create_context(
            cwd=cwd,
            language=language,
            env=env_list(envs),
            user=user,
            memory=memory,
            idle_timeout=idle_timeout,
        )

    async def list_code_contexts(self) -> List[Context]:
        """Lists the contexts of the sandbox, oldest first."""
        return await self._code.contexts()

    async def remove_code_context(self, context: Union[Context, str]) -> None:
        """Deletes a context, and kills what runs in it."""
        await self._client.call("DELETE", *self._context(context))

    async def restart_code_context(self, context: Union[Context, str]) -> None:
        """Begins a context anew, without its variables."""
        await self._client.call("POST", *self._context(context), "restart", document={})

    async def interrupt_code_context(self, context: Union[Context, str]) -> None:
        """Interrupts what runs in a context. Its variables stay."""
        await self._client.call("POST", *self._context(context), "interrupt", document={})

    async def list_languages(self) -> List[Language]:
        """Lists the languages of run_code. The sandbox's image need not have them all."""
        return await self._code.languages()

    def _context(self, context: Union[Context, str]) -> Sequence[str]:
        name = context if isinstance(context, str) else context.id
        return ("v1", "sandboxes", self.sandbox_id, "contexts", name)


async def _info(client: AsyncClient, sandbox_id: str) -> SandboxInfo:
    try:
        return SandboxInfo.of(await client.call("GET", "v1", "sandboxes", sandbox_id))
    except NotFoundException as e:
        raise SandboxNotFoundException(str(e), code=e.code) from None


async def _change(client: AsyncClient, sandbox_id: str, verb: str) -> None:
    await client.call("POST", "v1", "sandboxes", sandbox_id, verb, document={})


async def _pause(client: AsyncClient, sandbox_id: str) -> bool:
    if (await _info(client, sandbox_id)).state is SandboxState.PAUSED:
        return False  # the daemon pauses a paused one without an error
    await _change(client, sandbox_id, "pause")
    return True


async def _set_timeout(client: AsyncClient, sandbox_id: str, timeout: float) -> None:
    if timeout <= 0:
        raise InvalidArgumentException(f"timeout: {timeout} is no time from now")
    info = await _info(client, sandbox_id)
    document: Dict[str, Any] = {"timeout": timeout}
    if float(info.raw.get("idle_timeout") or 0) < timeout:
        document["idle_timeout"] = timeout
    await client.call("PATCH", "v1", "sandboxes", sandbox_id, document=document)


