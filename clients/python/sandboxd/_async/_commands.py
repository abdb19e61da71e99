"""Commands and terminals of a sandbox.

A command in the foreground is an exec whose client is this one: closing the connection kills it and
all that it started. One in the background, or on a terminal, is a detached exec: it outlives its
client, and others can connect to it.
"""

from __future__ import annotations

import codecs
from typing import Any, AsyncIterator, Dict, List, Literal, Mapping, Optional, Tuple, Union, overload

from .. import _requests
from ..exceptions import (
    ConnectionException,
    InvalidArgumentException,
    NotFoundException,
    ProgramNotFoundException,
    ProtocolException,
    SandboxNotFoundException,
    from_problem,
)
from ..models import CommandResult, Envs, ProcessInfo, PtySize
from ._client import FRAMES, NDJSON, AsyncClient, AsyncResponse, decode
from ._stream import Callback, Job, call

_UNSET: Any = object()
#: Seconds after which a command in the foreground is killed if its caller names no timeout.
DEFAULT_TIMEOUT = 60.0
#: Bytes that the daemon keeps of a background command's output until they are read.
BACKGROUND_OUTPUT = 4 << 20


class Decoder:
    """Decodes one stream of output. A character that comes in two pieces stays whole."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._parts: List[str] = []

    def add(self, data: bytes, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        if text:
            self._parts.append(text)
        return text

    @property
    def text(self) -> str:
        return "".join(self._parts)


class AsyncCommandHandle:
    """A command in the background, or a terminal.

    Its output is kept by the daemon until it is read, the last 4 MiB of it by default. Iterating
    yields ``(stdout, stderr, pty)``, of which one is not None.
    """

    def __init__(
        self,
        client: AsyncClient,
        sandbox_id: str,
        record: Mapping[str, Any],
        timeout: Optional[float] = None,
    ) -> None:
        self._client = client
        self._path = ("v1", "sandboxes", sandbox_id, "execs", str(record.get("id", "")))
        self._tty = bool(record.get("tty"))
        self._timeout = timeout
        self._offset = 0
        self._response: Optional[AsyncResponse] = None
        self._out, self._err = Decoder(), Decoder()
        self._ending: Optional[_requests.Ending] = None
        self._job: Optional[Job] = None
        self._dropped = 0
        self._on_stdout: Optional[Callback[str]] = None
        self._on_stderr: Optional[Callback[str]] = None
        self._on_pty: Optional[Callback[bytes]] = None
        self.pid = int(record.get("pid", 0))
        self.exec_id = self._path[-1]

    @property
    def stdout(self) -> str:
        """Output that was read so far."""
        return self._out.text

    @property
    def stderr(self) -> str:
        return self._err.text

    @property
    def exit_code(self) -> Optional[int]:
        """The exit code, or None before the end was read."""
        return None if self._ending is None else self._ending.code

    @property
    def error(self) -> Optional[str]:
        return None if self._ending is None else self._ending.error

    async def events(self) -> AsyncIterator[Tuple[Optional[str], Optional[str], Optional[bytes]]]:
        """Yields output from where the last reader stopped, until the command's end."""
        if self._ending is not None:
            return
        response = await self._client.open(
            "GET",
            *self._path,
            "attach",
            query=[("from", str(self._offset) if self._offset else "start")],
            accept=NDJSON,
        )
        self._response = response
        try:
            async for event in response.lines():
                self._dropped += int(event.get("dropped") or 0)
                if event.get("error"):
                    raise from_problem(event["error"])
                if event.get("exit") is not None:
                    self._ending = _requests.Ending(event["exit"])
                    for text in self._flush():
                        yield text
                    return
                if event.get("offset") is not None:
                    self._offset = int(event["offset"])
                data = _requests.output(event)
                if not data:
                    continue
                self._offset += len(data)
                if self._tty:
                    self._out.add(data)
                    yield None, None, data
                elif event.get("stream") == "stderr":
                    text_ = self._err.add(data)
                    if text_:
                        yield None, text_, None
                else:
                    text_ = self._out.add(data)
                    if text_:
                        yield text_, None, None
        finally:
            response.close()
        raise ConnectionException("the daemon ended the stream without the exit of the command")

    def _flush(self) -> List[Tuple[Optional[str], Optional[str], Optional[bytes]]]:
        """Returns what a character that was cut off at the end leaves."""
        out, err = self._out.add(b"", True), self._err.add(b"", True)
        left: List[Tuple[Optional[str], Optional[str], Optional[bytes]]] = []
        if out and not self._tty:
            left.append((out, None, None))
        if err:
            left.append((None, err, None))
        return left

    def __aiter__(self) -> AsyncIterator[Tuple[Optional[str], Optional[str], Optional[bytes]]]:
        return self.events()

    def follow(
        self,
        on_stdout: Optional[Callback[str]] = None,
        on_stderr: Optional[Callback[str]] = None,
        on_pty: Optional[Callback[bytes]] = None,
    ) -> None:
        """Reads output beside the caller, and calls back as it comes."""
        self._on_stdout, self._on_stderr, self._on_pty = on_stdout, on_stderr, on_pty
        self._job = Job(self._pass_on)

    async def _pass_on(self) -> None:
        async for out, err, pty in self.events():
            if out is not None:
                await call(self._on_stdout, out)
            elif err is not None:
                await call(self._on_stderr, err)
            elif pty is not None:
                await call(self._on_pty, pty)

    async def wait(
        self,
        on_pty: Optional[Callback[bytes]] = None,
        on_stdout: Optional[Callback[str]] = None,
        on_stderr: Optional[Callback[str]] = None,
    ) -> CommandResult:
        """Waits for the end and returns it.

        Raises CommandExitException if the exit code is not 0, and TimeoutException if the command
        was killed at its timeout.
        """
        if self._job is not None:
            if on_pty is not None or on_stdout is not None or on_stderr is not None:
                raise InvalidArgumentException("callbacks were given when the command was started")
            await self._job.join()
        else:
            self._on_stdout, self._on_stderr, self._on_pty = on_stdout, on_stderr, on_pty
            await self._pass_on()
        end = self._ending
        if end is None:
            raise ConnectionException("the output of the command is read elsewhere")
        end.check(self.stdout, self.stderr, self._dropped, self._timeout)
        return CommandResult(self.stderr, self.stdout, end.code, dropped=self._dropped)

    async def send_stdin(self, data: Union[str, bytes]) -> None:
        """Writes to the command's stdin, which it needs to have: ``run(…, stdin=True)``."""
        await self._client.call("POST", *self._path, "stdin", body=data)

    async def close_stdin(self) -> None:
        """Ends the command's stdin."""
        await self._client.call("POST", *self._path, "stdin", query=[("close", "true")], body=b"")

    async def resize(self, size: PtySize) -> None:
        """Sets the size of the terminal."""
        await self._client.call(
            "POST", *self._path, "resize", document={"rows": size.rows, "cols": size.cols}
        )

    async def send_signal(self, signal: str, all: bool = False) -> None:
        """Sends a signal to the command's process group, or with all to all that it started."""
        document: Dict[str, Any] = {"signal": signal}
        if all:
            document["all"] = True
        await self._client.call("POST", *self._path, "signal", document=document)

    async def kill(self) -> bool:
        """Kills the command with all that it started. Returns whether it ran."""
        return await _kill(self._client, self._path)

    async def disconnect(self) -> None:
        """Stops to read. The command runs on."""
        if self._response is not None:
            self._response.close()


async def _kill(client: AsyncClient, path: Tuple[str, ...]) -> bool:
    try:
        record = await client.call("GET", *path)
        if record.get("state") != "running":
            return False
        await client.call("POST", *path, "signal", document={"signal": "SIGKILL", "all": True})
    except SandboxNotFoundException:
        raise
    except NotFoundException:
        return False
    return True


class _Execs:
    """What commands and terminals have in common."""

    def __init__(self, client: AsyncClient, sandbox_id: str) -> None:
        self._client = client
        self._id = sandbox_id
        self._shell = "/bin/bash"

    def _argv(self, cmd: _requests.Command) -> List[str]:
        return _requests.shell(cmd, self._shell)

    async def _records(self) -> List[Dict[str, Any]]:
        answer = await self._client.call("GET", "v1", "sandboxes", self._id, "execs")
        return list(answer.get("execs") or [])

    async def _find(self, pid: int, ended: bool = False) -> Dict[str, Any]:
        """Returns the exec with a pid: one that runs, else the latest."""
        found: Optional[Dict[str, Any]] = None
        for record in await self._records():
            if record.get("pid") == pid and (ended or record.get("state") == "running"):
                if found is None or found.get("state") != "running":
                    found = record
        if found is None:
            raise NotFoundException(f"the sandbox has no command with pid {pid}", code="not_found")
        return found

    async def _handle(self, pid: int, ended: bool = False) -> AsyncCommandHandle:
        return AsyncCommandHandle(self._client, self._id, await self._find(pid, ended))

    async def kill(self, pid: int, request_timeout: Optional[float] = None) -> bool:
        """Kills a command with all that it started. Returns whether it ran."""
        try:
            record = await self._find(pid)
        except SandboxNotFoundException:
            raise
        except NotFoundException as e:
            if "no command with pid" not in str(e):
                raise
            return False
        path = ("v1", "sandboxes", self._id, "execs", str(record["id"]))
        return await _kill(self._client, path)

    async def send_stdin(
        self, pid: int, data: Union[str, bytes], request_timeout: Optional[float] = None
    ) -> None:
        """Writes to the stdin of a command."""
        handle = await self._handle(pid)
        await handle.send_stdin(data)

    async def _detach(self, body: Mapping[str, Any], rt: Optional[float]) -> Dict[str, Any]:
        return await self._client.call(
            "POST", "v1", "sandboxes", self._id, "exec", document=body, request_timeout=rt
        )


class AsyncCommands(_Execs):
    """Commands of a sandbox: ``sandbox.commands``."""

    @overload
    async def run(
        self,
        cmd: _requests.Command,
        background: Literal[False, None] = None,
        envs: Optional[Envs] = None,
        user: Optional[str] = None,
        cwd: Optional[str] = None,
        on_stdout: Optional[Callback[str]] = None,
        on_stderr: Optional[Callback[str]] = None,
        stdin: Union[bool, str, bytes, None] = None,
        timeout: Optional[float] = _UNSET,
        request_timeout: Optional[float] = None,
    ) -> CommandResult: ...

    @overload
    async def run(
        self,
        cmd: _requests.Command,
        background: Literal[True],
        envs: Optional[Envs] = None,
        user: Optional[str] = None,
        cwd: Optional[str] = None,
        on_stdout: Optional[Callback[str]] = None,
        on_stderr: Optional[Callback[str]] = None,
        stdin: Union[bool, str, bytes, None] = None,
        timeout: Optional[float] = _UNSET,
        request_timeout: Optional[float] = None,
    ) -> AsyncCommandHandle: ...

    async def run(
        self,
        cmd: _requests.Command,
        background: Optional[bool] = None,
        envs: Optional[Envs] = None,
        user: Optional[str] = None,
        cwd: Optional[str] = None,
        on_stdout: Optional[Callback[str]] = None,
        on_stderr: Optional[Callback[str]] = None,
        stdin: Union[bool, str, bytes, None] = None,
        timeout: Optional[float] = _UNSET,
        request_timeout: Optional[float] = None,
    ) -> Any:
        """Runs a command: text in bash, or in sh where the image has no bash; a list without a shell.

        In the foreground it returns a CommandResult, and raises CommandExitException if the exit
        code is not 0. After ``timeout`` seconds, 60 by default, the command and all that it started
        are killed, and TimeoutException has the output until then.

        With ``background`` it returns a CommandHandle at once, and there is no default timeout. 0
        means none, in either case.

        ``stdin`` is the whole input as text or bytes; True keeps the stdin of a background command
        open for ``send_stdin``.
        """
        limit = timeout
        if limit is _UNSET:
            limit = None if background else DEFAULT_TIMEOUT
        try:
            return await self._run(
                cmd, bool(background), envs, user, cwd, on_stdout, on_stderr, stdin, limit, request_timeout
            )
        except ProgramNotFoundException:
            if not isinstance(cmd, str) or self._shell == "/bin/sh":
                raise
            self._shell = "/bin/sh"
        return await self._run(
            cmd, bool(background), envs, user, cwd, on_stdout, on_stderr, stdin, limit, request_timeout
        )

    async def _run(
        self,
        cmd: _requests.Command,
        background: bool,
        envs: Optional[Envs],
        user: Optional[str],
        cwd: Optional[str],
        on_stdout: Optional[Callback[str]],
        on_stderr: Optional[Callback[str]],
        stdin: Union[bool, str, bytes, None],
        timeout: Optional[float],
        request_timeout: Optional[float],
    ) -> Any:
        more: Dict[str, Any] = {}
        if isinstance(stdin, (str, bytes)):
            more["stdin"] = _requests.stdin(stdin)
        elif stdin and not background:
            raise InvalidArgumentException("stdin=True: only a command in the background can keep it open")
        elif stdin:
            more["stdin_open"] = True
        if background:
            more.update(detach=True, output_limit=BACKGROUND_OUTPUT)
        body = _requests.execution(
            self._argv(cmd), envs=envs, cwd=cwd, user=user, timeout=timeout, **more
        )
        if not background:
            return await self._foreground(body, on_stdout, on_stderr, timeout, request_timeout)
        record = await self._detach(body, request_timeout)
        handle = AsyncCommandHandle(self._client, self._id, record, timeout)
        if on_stdout is not None or on_stderr is not None:
            handle.follow(on_stdout, on_stderr)
        return handle

    async def _foreground(
        self,
        body: Mapping[str, Any],
        on_stdout: Optional[Callback[str]],
        on_stderr: Optional[Callback[str]],
        timeout: Optional[float],
        request_timeout: Optional[float],
    ) -> CommandResult:
        out, err = Decoder(), Decoder()
        end: Optional[_requests.Ending] = None
        response = await self._client.open(
            "POST",
            "v1",
            "sandboxes",
            self._id,
            "exec",
            document=body,
            accept=FRAMES,
            request_timeout=request_timeout,
        )
        response.untimed()  # the command's own timeout bounds the rest
        try:
            async for channel, payload in response.frames():
                if channel == 1:
                    text = out.add(payload)
                    if text:
                        await call(on_stdout, text)
                elif channel == 2:
                    text = err.add(payload)
                    if text:
                        await call(on_stderr, text)
                elif channel == 3:
                    event = decode(payload)
                    if event.get("error"):
                        raise from_problem(event["error"])
                    if event.get("exit") is not None:
                        end = _requests.Ending(event["exit"])
                        break
                else:
                    raise ProtocolException(f"a frame of the unknown channel {channel}")
        finally:
            response.close()
        text = out.add(b"", True)
        if text:
            await call(on_stdout, text)
        text = err.add(b"", True)
        if text:
            await call(on_stderr, text)
        if end is None:
            raise ConnectionException("the daemon ended the stream without the exit of the command")
        end.check(out.text, err.text, 0, timeout)
        return CommandResult(err.text, out.text, end.code)

    async def list(self, request_timeout: Optional[float] = None) -> List[ProcessInfo]:
        """Returns the running commands, those with a client included."""
        out = []
        for record in await self._records():
            if record.get("state") != "running":
                continue
            argv = [str(a) for a in record.get("argv") or [""]]
            out.append(
                ProcessInfo(int(record["pid"]), record.get("id"), argv[0], argv[1:], {}, record.get("cwd"))
            )
        return out

    async def connect(
        self,
        pid: int,
        on_stdout: Optional[Callback[str]] = None,
        on_stderr: Optional[Callback[str]] = None,
        timeout: Optional[float] = None,
        request_timeout: Optional[float] = None,
    ) -> AsyncCommandHandle:
        """Returns a handle of a background command, also of another client's.

        It begins with the output that is kept. The exit of an ended one is kept for an hour.
        """
        handle = await self._handle(pid, ended=True)
        if on_stdout is not None or on_stderr is not None:
            handle.follow(on_stdout, on_stderr)
        return handle

    async def close_stdin(self, pid: int, request_timeout: Optional[float] = None) -> None:
        """Ends the stdin of a command."""
        handle = await self._handle(pid)
        await handle.close_stdin()


class AsyncPty(_Execs):
    """Terminals of a sandbox: ``sandbox.pty``."""

    async def create(
        self,
        size: Optional[PtySize] = None,
        on_data: Optional[Callback[bytes]] = None,
        user: Optional[str] = None,
        cwd: Optional[str] = None,
        envs: Optional[Envs] = None,
        cmd: Optional[_requests.Command] = None,
        timeout: Optional[float] = None,
        request_timeout: Optional[float] = None,
    ) -> AsyncCommandHandle:
        """Starts a shell, or cmd, on a terminal. It outlives its client."""
        size = size or PtySize()
        env = {"TERM": "xterm-256color", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", **(envs or {})}
        record: Dict[str, Any] = {}
        for attempt in ("/bin/bash", "/bin/sh"):
            argv = _requests.shell(cmd, attempt) if cmd is not None else [attempt, "-i"]
            body = _requests.execution(
                argv,
                envs=env,
                cwd=cwd,
                user=user,
                timeout=timeout,
                tty=True,
                rows=size.rows,
                cols=size.cols,
                detach=True,
                output_limit=BACKGROUND_OUTPUT,
            )
            try:
                record = await self._detach(body, request_timeout)
                break
            except ProgramNotFoundException:
                if attempt == "/bin/sh" or (cmd is not None and not isinstance(cmd, str)):
                    raise
        handle = AsyncCommandHandle(self._client, self._id, record, timeout)
        if on_data is not None:
            handle.follow(on_pty=on_data)
        return handle

    async def connect(
        self, pid: int, on_data: Optional[Callback[bytes]] = None, request_timeout: Optional[float] = None
    ) -> AsyncCommandHandle:
        """Returns a handle of a terminal, also of another client's."""
        handle = await self._handle(pid, ended=True)
        if on_data is not None:
            handle.follow(on_pty=on_data)
        return handle

    async def resize(self, pid: int, size: PtySize, request_timeout: Optional[float] = None) -> None:
        """Sets the size of a terminal."""
        handle = await self._handle(pid)
        await handle.resize(size)


