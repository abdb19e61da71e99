"""Sessions, in the shape of LLM Sandbox."""

from __future__ import annotations

import base64
import io
import os
import posixpath
import shlex
import tarfile
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from .. import exceptions as native
from .._sync._sandbox import Sandbox
from ..models import Execution, OutputMessage, Result
from . import _runtime, security
from .const import SandboxBackend, SupportedLanguage
from .data import ConsoleOutput, ExecutionResult, FileType, PlotOutput
from .exceptions import (
    CommandEmptyError,
    ContainerError,
    ExtraArgumentsError,
    ImageNotFoundError,
    ImagePullError,
    LanguageNotSupportedError,
    LanguageNotSupportPlotError,
    LibraryInstallationNotSupportedError,
    NotOpenSessionError,
    PackageManagerError,
    ResourceError,
    SandboxError,
    SandboxTimeoutError,
    SecurityViolationError,
    UnsupportedBackendError,
    ValidationError,
)

Text = Callable[[str], Any]

#: Seconds that a session lasts at most if it is given no session_timeout: a week.
LONGEST = 7 * 86400.0


class BaseSession:
    """A sandbox, and a language in it.

    ``backend`` and ``client`` are accepted, so that programs need no change: the backend is always
    sandboxd. A session has no network unless it is asked for one, by ``network`` or
    ``runtime_configs={"network_mode": "bridge"}``, or by libraries of the constructor. With
    ``library_dir`` libraries are packages in that directory of the sandbox, without a network.

    The sandbox is deleted when the session is closed, and when this process ends, however it does.
    """

    def __init__(
        self,
        lang: Union[str, SupportedLanguage] = "python",
        image: Optional[str] = None,
        *,
        backend: Union[str, SandboxBackend] = SandboxBackend.SANDBOXD,
        client: Any = None,
        dockerfile: Optional[str] = None,
        keep_template: bool = False,
        commit_container: bool = False,
        verbose: bool = False,
        stream: bool = False,
        runtime_configs: Optional[Mapping[str, Any]] = None,
        mounts: Optional[Sequence[Any]] = None,
        workdir: str = "/sandbox",
        security_policy: Optional[security.SecurityPolicy] = None,
        default_timeout: Optional[float] = None,
        execution_timeout: Optional[float] = None,
        session_timeout: Optional[float] = None,
        container_id: Optional[str] = None,
        skip_environment_setup: bool = False,
        encoding_errors: str = "replace",
        libraries: Optional[Sequence[str]] = None,
        library_dir: Optional[str] = None,
        network: Any = None,
        limits: Optional[Mapping[str, Any]] = None,
        snapshot: Optional[str] = None,
        profile: Optional[str] = None,
        socket: Optional[str] = None,
        **extra: Any,
    ) -> None:
        try:
            SandboxBackend(backend)
        except ValueError:
            raise UnsupportedBackendError(backend) from None
        try:
            self.lang = SupportedLanguage(str(getattr(lang, "value", lang)).lower()).value
        except ValueError:
            raise LanguageNotSupportedError(str(lang)) from None
        if dockerfile is not None:
            hint = "build it with: sandboxd build -t NAME DIRECTORY, and give image=NAME"
            raise ExtraArgumentsError(f"dockerfile: sessions do not build images; {hint}")
        if commit_container:
            raise ExtraArgumentsError("commit_container: take a snapshot: session.sandbox.create_snapshot()")
        if extra:
            raise ExtraArgumentsError(f"{', '.join(sorted(extra))}: no meaning here")
        self._create: Dict[str, Any] = _runtime.creation(runtime_configs or {})
        if mounts:
            more = _runtime.creation({"mounts": mounts})["settings"]["mounts"]
            self._create.setdefault("settings", {}).setdefault("mounts", []).extend(more)
        if network is not None:
            self._create["network"] = network
        elif libraries and library_dir is None and "network" not in self._create:
            self._create["network"] = "full"
        if limits:
            self._create["limits"] = {**self._create.get("limits", {}), **limits}
        self._create.setdefault("cwd", workdir)
        self._create.update(image=image, snapshot=snapshot, profile=profile, socket=socket)
        # Without a time of its own a session lasts as long as this process, to which it is tied; the
        # daemon's defaults would end one that idles for ten minutes.
        self._create["timeout"] = session_timeout or LONGEST
        self.workdir = workdir
        self.security_policy = security_policy
        self.verbose = verbose
        self.stream = stream
        self._timeout = execution_timeout if execution_timeout is not None else default_timeout
        self._container_id = container_id
        self._may_install = not skip_environment_setup
        self._libraries = list(libraries or [])
        self._library_dir = library_dir
        self._socket = socket
        self._sandbox: Optional[Sandbox] = None

    # Life

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox of the open session."""
        if self._sandbox is None:
            raise NotOpenSessionError()
        return self._sandbox

    @property
    def is_open(self) -> bool:
        return self._sandbox is not None

    @property
    def container_id(self) -> Optional[str]:
        """The id of the sandbox."""
        return self._sandbox.sandbox_id if self._sandbox is not None else self._container_id

    def open(self) -> None:
        """Creates the sandbox, or connects to that of ``container_id``."""
        if self._sandbox is not None:
            return
        with _Errors(self.lang):
            if self._container_id is not None:
                self._sandbox = Sandbox.connect(self._container_id, socket=self._socket)
                return
            self._sandbox = self._new()
        try:
            with _Errors(self.lang):
                self._sandbox.files.make_dir(self.workdir)
            if self._libraries:
                self.install(self._libraries)
        except BaseException:
            self.close()
            raise

    def _new(self) -> Sandbox:
        return Sandbox.create(tie=True, **self._create)

    def close(self) -> None:
        """Deletes the sandbox. One of ``container_id`` stays."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None and self._container_id is None:
            with _Errors(self.lang):
                sandbox.kill()

    def __enter__(self) -> Any:
        self.open()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    # Code

    def is_safe(self, code: str) -> Tuple[bool, List[security.SecurityPattern]]:
        """Reports whether the policy allows code, and what it found; the daemon's own counts too.

        Code that is not safe does not run either.
        """
        policy = self.security_policy or security.SecurityPolicy()
        options: Dict[str, Any] = {"check": True}
        if getattr(self, "_context", None) is not None:
            options["context"] = getattr(self, "_context")
        try:
            found = self._run(code, None, None, None, None, **options).findings
        except SecurityViolationError as e:
            return False, e.violations
        return True, [policy.violation(f) for f in found]

    def run(
        self,
        code: str,
        libraries: Optional[Sequence[str]] = None,
        timeout: Optional[float] = None,
        on_stdout: Optional[Text] = None,
        on_stderr: Optional[Text] = None,
        stdin: Union[str, bytes, None] = None,
    ) -> ConsoleOutput:
        """Runs code in a process of its own, and returns exit code and output.

        Raises SandboxTimeoutError at the timeout, and every process of the run is killed then.
        """
        return _console(self._run(code, libraries, timeout, on_stdout, on_stderr, stdin=stdin))

    def _run(
        self,
        code: str,
        libraries: Optional[Sequence[str]],
        timeout: Optional[float],
        on_stdout: Optional[Text],
        on_stderr: Optional[Text],
        **options: Any,
    ) -> Execution:
        limit = timeout if timeout is not None else self._timeout
        self._check_libraries(libraries)
        if "context" not in options:
            options.update(language=self.lang, stateless=True, cwd=self.workdir)
        if options.get("stdin") is None:
            options.pop("stdin", None)
        if self.security_policy is not None:
            options["policy"] = self.security_policy.document()
        with _Errors(self.lang, limit, self.security_policy):
            return self.sandbox.run_code(
                code,
                libraries=libraries,
                library_dir=self._library_dir if libraries else None,
                timeout=limit,
                on_stdout=_text(on_stdout),
                on_stderr=_text(on_stderr),
                **options,
            )

    def install(self, libraries: Optional[Sequence[str]] = None) -> None:
        """Installs libraries. It raises if one of them is not installed then."""
        names = list(libraries or [])
        if not names:
            return
        if not self._may_install:
            raise LibraryInstallationNotSupportedError(self.lang)
        self._check_libraries(names)
        with _Errors(self.lang):
            self.sandbox.install(*names, language=self.lang, library_dir=self._library_dir, timeout=0)

    def _check_libraries(self, libraries: Optional[Sequence[str]]) -> None:
        if not libraries:
            return
        if self.security_policy is not None:
            for module in self.security_policy.restricted_modules:
                if module.name in libraries:
                    raise SecurityViolationError(f"The policy forbids the library {module.name}")

    # Commands

    def execute_command(
        self,
        command: str,
        workdir: Optional[str] = None,
        timeout: Optional[float] = None,
        on_stdout: Optional[Text] = None,
        on_stderr: Optional[Text] = None,
    ) -> ConsoleOutput:
        """Runs a command without a shell; it is split as a shell splits words.

        A pipe needs ``sh -c '…'``.
        """
        if not command or not command.strip():
            raise CommandEmptyError()
        try:
            argv = shlex.split(command)
        except ValueError as e:
            raise ValidationError(f"split {command!r}: {e}") from e
        limit = timeout if timeout is not None else self._timeout
        with _Errors(self.lang, limit):
            try:
                result = self.sandbox.commands.run(
                    argv,
                    cwd=workdir or self.workdir,
                    timeout=limit or 0,
                    on_stdout=on_stdout,
                    on_stderr=on_stderr,
                )
            except native.CommandExitException as e:
                return ConsoleOutput(e.exit_code, e.stderr, e.stdout)
            except native.ProgramNotFoundException as e:
                return ConsoleOutput(127 if e.code == "program_not_found" else 126, str(e) + "\n", "")
        return ConsoleOutput(result.exit_code, result.stderr, result.stdout)

    def execute_commands(
        self,
        commands: Sequence[Union[str, Tuple[str, Optional[str]]]],
        workdir: Optional[str] = None,
        timeout: Optional[float] = None,
        on_stdout: Optional[Text] = None,
        on_stderr: Optional[Text] = None,
    ) -> ConsoleOutput:
        """Runs commands one after the other until one fails, and returns the last outcome."""
        if not commands:
            raise CommandEmptyError()
        out = ConsoleOutput()
        for command in commands:
            text, where = (command, workdir) if isinstance(command, str) else command
            out = self.execute_command(text, where or workdir, timeout, on_stdout, on_stderr)
            if out.exit_code != 0:
                break
        return out

    # Files

    def copy_to_runtime(self, src: str, dest: str) -> None:
        """Copies a file or directory of the host to dest, and makes missing directories."""
        if not os.path.exists(src):
            raise FileNotFoundError(src)
        with _Errors(self.lang):
            if os.path.isdir(src):
                self.sandbox.files.write_archive(_inside(dest), _pack(src))
                return
            with open(src, "rb") as f:
                mode = os.fstat(f.fileno()).st_mode & 0o777
                self.sandbox.files.write(_inside(dest), f, mode=mode)

    def copy_from_runtime(self, src: str, dest: str) -> None:
        """Copies a file of the sandbox to dest, or a directory's content below it.

        Only files, directories and links that stay below dest are made on the host.
        """
        with _Errors(self.lang):
            files = self.sandbox.files
            if files.get_info(_inside(src)).type.value == "dir":
                _unpack(files.read_archive(src), dest)
                return
            os.makedirs(os.path.dirname(os.path.abspath(dest)), exist_ok=True)
            target = os.path.join(dest, posixpath.basename(src)) if os.path.isdir(dest) else dest
            with open(target, "wb") as f:
                for piece in files.read(src, format="stream"):
                    f.write(piece)

    def get_archive(self, path: str) -> Tuple[bytes, Dict[str, Any]]:
        """Returns a tar of a file or directory, and its name, size, mode and time."""
        with _Errors(self.lang):
            info = self.sandbox.files.get_info(_inside(path))
            data = self.sandbox.files.read_archive(path)
        stat = {
            "name": info.name,
            "size": info.size,
            "mode": info.mode,
            "mtime": info.modified_time.isoformat() if info.modified_time else "",
            "linkTarget": info.symlink_target or "",
        }
        return data, stat


class SandboxSession(BaseSession):
    """A session whose runs are processes of their own. With ``pool`` its sandbox is one of a pool."""

    def __new__(cls, *args: Any, pool: Any = None, **options: Any) -> Any:
        if pool is not None and cls in (SandboxSession, ArtifactSandboxSession):
            from .pool import ArtifactPooledSandboxSession, PooledSandboxSession

            # Its __init__ is called with the same arguments after this.
            artifacts = cls is ArtifactSandboxSession
            cls = ArtifactPooledSandboxSession if artifacts else PooledSandboxSession
        return super().__new__(cls)


class _Plots:
    """Runs that keep their plots. It is mixed into sessions."""

    enable_plotting: bool = True
    _plots: List[PlotOutput]

    def _run_plots(self, session: BaseSession, code: str, clear: bool, *args: Any) -> ExecutionResult:
        if clear:
            self.clear_plots()
        languages = {lang.name: lang for lang in session.sandbox.list_languages()}
        if not (self.enable_plotting and languages.get(session.lang) and languages[session.lang].contexts):
            out = session._run(code, *args)
            return ExecutionResult(out.exit_code, "".join(out.logs.stderr), "".join(out.logs.stdout), self._plots[:])
        with _Errors(session.lang):
            context = session.sandbox.create_code_context(cwd=session.workdir, language=session.lang)
        try:
            out = session._run(code, *args, context=context)
        finally:
            try:
                session.sandbox.remove_code_context(context)
            except native.NotFoundException:
                pass
        for result in out.results:
            self._plots.extend(_plots_of(result))
        console = _console(out)
        return ExecutionResult(console.exit_code, console.stderr, console.stdout, self._plots[:])

    def clear_plots(self) -> None:
        """Forgets the plots of earlier runs."""
        self._plots = []


class ArtifactSandboxSession(SandboxSession, _Plots):
    """A session whose runs return the plots that they displayed.

    Every run has a new interpreter. Plots of earlier runs are returned too, until ``clear_plots``.
    """

    def __init__(self, *args: Any, enable_plotting: bool = True, **options: Any) -> None:
        super().__init__(*args, **options)
        self.enable_plotting = enable_plotting
        self._plots = []

    def open(self) -> None:
        if self.enable_plotting and self.lang not in ("python", "r", "javascript", "typescript"):
            raise LanguageNotSupportPlotError(self.lang)
        super().open()

    def run(  # type: ignore[override]
        self,
        code: str,
        libraries: Optional[Sequence[str]] = None,
        timeout: Optional[float] = None,
        on_stdout: Optional[Text] = None,
        on_stderr: Optional[Text] = None,
        clear_plots: bool = False,
    ) -> ExecutionResult:
        """Runs code and returns exit code, output and plots."""
        return self._run_plots(self, code, clear_plots, libraries, timeout, on_stdout, on_stderr)


def _plots_of(result: Result) -> List[PlotOutput]:
    """Returns the form of a result that shows it best, if it is a picture."""
    for name in ("png", "svg", "jpeg", "pdf"):
        value = getattr(result, name)
        if value is None:
            continue
        if name == "svg":
            value = base64.b64encode(value.encode()).decode()
        width, height = _png_size(value) if name == "png" else (None, None)
        return [PlotOutput(FileType(name), value, width, height)]
    if result.html is not None and ("plotly" in result.html or result.chart is not None):
        return [PlotOutput(FileType.HTML, base64.b64encode(result.html.encode()).decode())]
    return []


def _png_size(content: str) -> Tuple[Optional[int], Optional[int]]:
    head = base64.b64decode(content[:32])
    if len(head) < 24 or head[:8] != b"\x89PNG\r\n\x1a\n":
        return None, None
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


def _console(out: Execution) -> ConsoleOutput:
    stderr = "".join(out.logs.stderr)
    if out.error is not None and out.error.traceback and out.error.traceback.strip() not in stderr:
        stderr += out.error.traceback.rstrip("\n") + "\n"  # in a context it is no part of stderr
    return ConsoleOutput(out.exit_code or (1 if out.error else 0), stderr, "".join(out.logs.stdout))


def _text(callback: Optional[Text]) -> Optional[Callable[[OutputMessage], Any]]:
    if callback is None:
        return None
    given = callback

    def pass_on(message: OutputMessage) -> None:
        given(message.line)

    return pass_on


def _inside(path: str) -> str:
    if ".." in path.split("/"):
        raise ValidationError(f"{path!r}: \"..\" is not allowed")
    return path


def _pack(directory: str) -> bytes:
    out = io.BytesIO()

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return entry

    with tarfile.open(fileobj=out, mode="w") as t:
        t.add(directory, arcname=".", filter=plain)
    return out.getvalue()


def _unpack(data: bytes, dest: str) -> None:
    """Extracts files and directories below dest, then links that cannot lead out of it.

    The archive is the sandbox's. A link may neither be absolute nor have "..", so that no chain of
    links goes up either; and links come last, so that no file is written through one.
    """
    os.makedirs(dest, exist_ok=True)
    links = []
    with tarfile.open(fileobj=io.BytesIO(data)) as t:
        for entry in t:
            parts = [p for p in entry.name.split("/") if p not in ("", ".")]
            if ".." in parts or entry.name.startswith("/"):
                raise ValidationError(f"the archive has the name {entry.name!r}")
            target = os.path.join(dest, *parts)
            if entry.isdir():
                _real_directory(dest, parts)
            elif entry.isreg() or entry.islnk():
                content = t.extractfile(entry)
                _real_directory(dest, parts[:-1])
                if os.path.islink(target):
                    os.unlink(target)
                with open(target, "wb") as f:
                    while content is not None:
                        piece = content.read(1 << 20)
                        if not piece:
                            break
                        f.write(piece)
                os.chmod(target, entry.mode & 0o777)
            elif entry.issym():
                if not entry.linkname.startswith("/") and ".." not in entry.linkname.split("/"):
                    links.append((parts, entry.linkname))
    for parts, name in links:
        _real_directory(dest, parts[:-1])
        target = os.path.join(dest, *parts)
        if not os.path.lexists(target):
            os.symlink(name, target)


def _real_directory(dest: str, parts: Sequence[str]) -> None:
    """Makes directories below dest. One that is a link is an error."""
    path = dest
    for part in parts:
        path = os.path.join(path, part)
        if os.path.islink(path):
            raise ValidationError(f"{path} is a link, and was to be a directory")
        if not os.path.isdir(path):
            os.mkdir(path)


class _Errors:
    """Turns the errors of the client into those of sessions."""

    def __init__(
        self,
        lang: str,
        timeout: Optional[float] = None,
        policy: Optional[security.SecurityPolicy] = None,
    ) -> None:
        self._lang, self._timeout = lang, timeout
        self._policy = policy or security.SecurityPolicy()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, e: Any, trace: Any) -> None:
        if not isinstance(e, native.SandboxException) or isinstance(e, native.CommandExitException):
            return
        text = str(e)
        if isinstance(e, native.TimeoutException):
            raise SandboxTimeoutError(text, self._timeout, e.stdout, e.stderr) from e
        if isinstance(e, native.CodeRefusedException):
            violations = [self._policy.violation(f) for f in e.findings]
            raise SecurityViolationError(text, violations) from e
        if isinstance(e, native.FileNotFoundException):
            raise FileNotFoundError(text) from e
        if isinstance(e, native.SandboxNotFoundException):
            raise ContainerError(text) from e
        if isinstance(e, native.LibraryException):
            raise PackageManagerError(text) from e
        if isinstance(e, native.LanguageNotFoundException):
            raise LanguageNotSupportedError(self._lang, text) from e
        if isinstance(e, native.NotFoundException):
            raise ImageNotFoundError(text) from e
        if isinstance(e, native.TemplateException):
            raise ImagePullError(text) from e
        if isinstance(e, (native.UnenforceableException, native.NotEnoughSpaceException)):
            raise ResourceError(text) from e
        if isinstance(e, native.InvalidArgumentException):
            raise ValidationError(text) from e
        if isinstance(e, (native.ConflictException, native.ConnectionException)):
            raise ContainerError(text) from e
        raise SandboxError(text) from e


def create_session(*args: Any, **options: Any) -> SandboxSession:
    """Returns a session, as SandboxSession(…) does."""
    return SandboxSession(*args, **options)
