"""Values that requests take and return. Those that E2B's SDK has too keep its names and fields."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from enum import Enum
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple, Union

from ._finding import Finding

from .exceptions import InvalidArgumentException, ProtocolException

#: Labels with this prefix are the client's own notes, and no metadata of the user.
OWN_LABELS = "sandboxd.client."

Envs = Mapping[str, str]
Size = Union[int, str]

_TIME = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:Z|([+-])(\d\d):(\d\d))\Z"
)
_TEMPORARY = re.compile(r"\.sandboxd-[0-9a-f]{16}\Z")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\Z", re.IGNORECASE)


def parse_time(text: Optional[str]) -> Optional[datetime]:
    """Returns an RFC 3339 time. datetime.fromisoformat reads "Z" and nanoseconds from 3.11 on only."""
    if not text:
        return None
    m = _TIME.match(text)
    if m is None:
        raise ProtocolException(f"{text!r} is no time")
    zone = timezone.utc
    if m.group(8):
        offset = timedelta(hours=int(m.group(9)), minutes=int(m.group(10)))
        zone = timezone(offset if m.group(8) == "+" else -offset)
    micro = int((m.group(7) or "0").ljust(9, "0")[:6])
    year, month, day, hour, minute, second = (int(m.group(i)) for i in range(1, 7))
    try:
        return datetime(year, month, day, hour, minute, second, micro, zone)
    except ValueError as e:
        raise ProtocolException(f"{text!r} is no time: {e}") from e


def parse_size(size: Size, name: str = "size") -> int:
    """Returns a number of bytes, also from text such as "512m" and "1.5GB"."""
    if isinstance(size, int) and not isinstance(size, bool):
        return size
    m = _SIZE.match(size.strip()) if isinstance(size, str) else None
    if m is None:
        raise InvalidArgumentException(f"{name}: {size!r} is no size such as 536870912 or \"512m\"")
    return int(float(m.group(1)) * 1024 ** " kmgt".index(m.group(2).lower() or " "))


def env_list(envs: Optional[Envs]) -> List[str]:
    """Returns an environment in the form of the API."""
    out = []
    for name, value in (envs or {}).items():
        if not name or "=" in name:
            raise InvalidArgumentException(f"envs: {name!r} is no name of a variable")
        out.append(f"{name}={value}")
    return out


def _clean(document: Mapping[str, Any]) -> Dict[str, Any]:
    """Returns the fields that are set."""
    return {k: v for k, v in document.items() if v is not None and v != [] and v != {}}


class SandboxState(str, Enum):
    """The phase of a sandbox's life."""

    CREATING = "creating"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"
    LOST = "lost"


@dataclass
class SandboxInfo:
    """A description of a sandbox. ``raw`` is the whole answer of the daemon."""

    sandbox_id: str
    name: str
    template_id: str  # its image
    state: SandboxState
    metadata: Dict[str, str]
    started_at: Optional[datetime]
    end_at: Optional[datetime]  # its deadline
    cpu_count: float  # 0 without a limit
    memory_mb: int  # 0 without a limit
    enforced: Dict[str, Any]
    raw: Dict[str, Any] = field(repr=False)

    @classmethod
    def of(cls, d: Mapping[str, Any]) -> "SandboxInfo":
        limits = d.get("limits") or {}
        labels = d.get("labels") or {}
        try:
            state = SandboxState(d["state"])
            return cls(
                sandbox_id=d["id"],
                name=d["name"],
                template_id=d["image"],
                state=state,
                metadata={k: v for k, v in labels.items() if not k.startswith(OWN_LABELS)},
                started_at=parse_time(d.get("started_at") or d.get("created_at")),
                end_at=parse_time(d.get("deadline")),
                cpu_count=float(limits.get("cpus", 0)),
                memory_mb=int(limits.get("memory", 0)) >> 20,
                enforced=dict(d.get("enforced") or {}),
                raw=dict(d),
            )
        except (KeyError, ValueError, TypeError) as e:
            raise ProtocolException(f"the daemon described a sandbox without {e}") from e


@dataclass
class SandboxQuery:
    """A filter of lists: metadata that a sandbox must have, and states of which it has one."""

    metadata: Optional[Dict[str, str]] = None
    state: Optional[List[SandboxState]] = None


@dataclass
class SnapshotInfo:
    """A snapshot. Sandboxes begin with its files: ``Sandbox.create(snapshot=…)``."""

    snapshot_id: str
    names: List[str]
    size: int
    created_at: Optional[datetime]
    consistent: bool  # no process ran while files were read
    raw: Dict[str, Any] = field(repr=False)

    @classmethod
    def of(cls, d: Mapping[str, Any]) -> "SnapshotInfo":
        return cls(
            snapshot_id=str(d.get("id", "")),
            names=[d["name"]] if d.get("name") else [],
            size=int(d.get("size", 0)),
            created_at=parse_time(d.get("created_at")),
            consistent=bool(d.get("consistent")),
            raw=dict(d),
        )


@dataclass
class CommandResult:
    """The end of a command, and its output.

    ``dropped`` counts bytes of a background command's output that were no longer kept when they
    were read. ``error`` says why a command ended that did not exit by itself.
    """

    stderr: str
    stdout: str
    exit_code: int
    error: Optional[str] = None
    signal: Optional[str] = None
    oom: bool = False
    dropped: int = 0


@dataclass
class ProcessInfo:
    """A running command. ``pid`` is its number inside the sandbox, ``tag`` the daemon's id of it."""

    pid: int
    tag: Optional[str]
    cmd: str
    args: List[str]
    envs: Dict[str, str]
    cwd: Optional[str]


@dataclass
class PtySize:
    """The size of a terminal in characters."""

    rows: int = 24
    cols: int = 80


class FileType(str, Enum):
    """The type of a file."""

    FILE = "file"
    DIR = "dir"
    SYMLINK = "symlink"
    OTHER = "other"  # FIFO, socket or device


@dataclass
class EntryInfo:
    """A file of a sandbox. The sandbox controls all of it: sanitise names before printing them."""

    name: str
    type: FileType
    path: str
    size: int
    mode: int
    permissions: str
    owner: str
    group: str
    modified_time: Optional[datetime]
    symlink_target: Optional[str] = None

    @classmethod
    def of(cls, d: Mapping[str, Any]) -> "EntryInfo":
        kinds = {"file": FileType.FILE, "directory": FileType.DIR, "symlink": FileType.SYMLINK}
        path = _path(d, "path")
        try:
            mode = int(str(d.get("mode", "0")), 8)
        except ValueError as e:
            raise ProtocolException(f"the daemon described a file of mode {d.get('mode')!r}") from e
        return cls(
            name=path.rstrip("/").rpartition("/")[2],
            type=kinds.get(str(d.get("type")), FileType.OTHER),
            path=path,
            size=int(d.get("size", 0)),
            mode=mode & 0o777,
            permissions=_permissions(str(d.get("type")), mode),
            owner=str(d.get("user") or d.get("uid", "")),
            group=str(d.get("group") or d.get("gid", "")),
            modified_time=parse_time(d.get("mtime")),
            symlink_target=_path(d, "target") or None,
        )


def _permissions(kind: str, mode: int) -> str:
    first = {"directory": "d", "symlink": "l", "fifo": "p", "socket": "s", "block": "b", "char": "c"}
    bits = "".join(c if mode >> 8 - i & 1 else "-" for i, c in enumerate("rwxrwxrwx"))
    return first.get(kind, "-") + bits


@dataclass
class WriteInfo:
    """A file that was written."""

    name: str
    path: str
    type: FileType = FileType.FILE


class FilesystemEventType(str, Enum):
    """The kind of a change to a file."""

    CREATE = "create"
    WRITE = "write"
    CHMOD = "chmod"
    REMOVE = "remove"
    RENAME = "rename"
    OVERFLOW = "overflow"  # changes were missed: list the directory again


@dataclass
class FilesystemEvent:
    """A change to a file. ``name`` is relative to the watched directory; of a rename, the old one."""

    name: str
    type: FilesystemEventType
    new_name: Optional[str] = None

    @classmethod
    def of(cls, d: Mapping[str, Any], root: str) -> Optional["FilesystemEvent"]:
        kinds = {
            "created": FilesystemEventType.CREATE,
            "modified": FilesystemEventType.WRITE,
            "attributes": FilesystemEventType.CHMOD,
            "deleted": FilesystemEventType.REMOVE,
            "moved": FilesystemEventType.RENAME,
            "overflow": FilesystemEventType.OVERFLOW,
        }
        kind = kinds.get(str(d.get("kind")))
        if kind is None:
            return None
        moved = kind is FilesystemEventType.RENAME
        path = _path(d, "from" if moved else "path")
        new = _path(d, "to") if moved else ""
        # The daemon writes a file under another name first, so that it appears whole.
        if _TEMPORARY.match(path.rpartition("/")[2]):
            return cls(_relative(new, root), FilesystemEventType.WRITE) if new else None
        return cls(_relative(path, root), kind, _relative(new, root) if new else None)


def _path(d: Mapping[str, Any], name: str) -> str:
    """Returns a path. What is no UTF-8 in it are surrogates, as in os.fsdecode."""
    raw = d.get(f"{name}_bytes")
    if raw:
        try:
            return base64.b64decode(raw, validate=True).decode("utf-8", "surrogateescape")
        except (ValueError, TypeError) as e:
            raise ProtocolException(f"decode a path: {e}") from e
    return str(d.get(name) or "")


def _relative(path: str, root: str) -> str:
    prefix = root.rstrip("/") + "/"
    return path[len(prefix) :] if path.startswith(prefix) else path


@dataclass
class AgentRunInfo:
    """How a run of the agent stands. ``raw`` is the whole answer of the daemon.

    ``state`` is "running", "stopped" (its process was killed; it can be resumed) or "ended".
    """

    run_id: str
    directory: str  # on the daemon's host
    state: str
    exit_reason: Optional[str]  # of an ended run: "submitted" or another
    exit_detail: Optional[str]
    turns: int
    tool_calls: int
    denied: int  # tool calls that the policy refused
    tokens: int
    cost_usd: float
    seconds: float
    model: str
    query: str  # the beginning of the task
    sandbox_id: Optional[str]
    started_at: Optional[datetime]
    raw: Dict[str, Any] = field(repr=False)

    @classmethod
    def of(cls, d: Mapping[str, Any]) -> "AgentRunInfo":
        try:
            return cls(
                run_id=d["id"],
                directory=d["dir"],
                state=d["state"],
                exit_reason=d.get("exit_reason"),
                exit_detail=d.get("exit_detail"),
                turns=int(d.get("turns", 0)),
                tool_calls=int(d.get("tool_calls", 0)),
                denied=int(d.get("denied", 0)),
                tokens=int(d.get("tokens", 0)),
                cost_usd=float(d.get("cost_usd", 0)),
                seconds=float(d.get("seconds", 0)),
                model=str(d.get("model", "")),
                query=str(d.get("query", "")),
                sandbox_id=d.get("sandbox_id"),
                started_at=parse_time(d.get("started_at")),
                raw=dict(d),
            )
        except (KeyError, ValueError, TypeError) as e:
            raise ProtocolException(f"the daemon described an agent run without {e}") from e


#: Kinds of events of an agent run: the field of the record's line that has the rest.
_AGENT_KINDS = (
    "run",
    "sandbox",
    "request",
    "response",
    "verdict",
    "began",
    "ended",
    "turn_end",
    "outputs",
    "resumed",
    "end",
)


@dataclass
class AgentEvent:
    """A line of the record of an agent run (docs/reference/agent.md).

    ``kind`` is "omitted" if the line is too long to send; the run's directory has it.
    """

    number: int
    kind: str
    data: Any  # of the kind
    turn: Optional[int] = None
    raw: Dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, d: Mapping[str, Any]) -> "AgentEvent":
        line = d.get("event")
        if not isinstance(line, dict):
            return cls(int(d.get("n", 0)), "omitted", d.get("omitted"))
        kind = next((k for k in _AGENT_KINDS if k in line), "unknown")
        return cls(int(d.get("n", 0)), kind, line.get(kind), line.get("turn"), line)


@dataclass
class OutputMessage:
    """A piece of output of code. ``timestamp`` is in nanoseconds since 1970."""

    line: str
    timestamp: int
    error: bool = False

    def __str__(self) -> str:
        return self.line


@dataclass
class ExecutionError:
    """An exception that ended code, or a compiler's message."""

    name: str
    value: str
    traceback: str

    def to_json(self) -> str:
        return json.dumps({"name": self.name, "value": self.value, "traceback": self.traceback})


class Chart:
    """A chart as data: its fields are attributes, such as ``type``, ``title`` and ``elements``."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = dict(document)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return _chart(self._document[name])
        except KeyError:
            raise AttributeError(f"this chart has no {name}") from None

    def __repr__(self) -> str:
        return f"Chart({self._document!r})"

    def to_dict(self) -> Dict[str, Any]:
        return dict(self._document)


def _chart(value: Any) -> Any:
    if isinstance(value, dict):
        return Chart(value)
    if isinstance(value, list):
        return [_chart(v) for v in value]
    return value


#: Forms of a result: field, media type, and whether it is base64.
_FORMS: Tuple[Tuple[str, str, bool], ...] = (
    ("text", "text/plain", False),
    ("html", "text/html", False),
    ("markdown", "text/markdown", False),
    ("svg", "image/svg+xml", False),
    ("png", "image/png", True),
    ("jpeg", "image/jpeg", True),
    ("pdf", "application/pdf", True),
    ("latex", "text/latex", False),
    ("json", "application/json", False),
    ("javascript", "application/javascript", False),
)


@dataclass
class Result:
    """A value that code displayed, in the forms that it has. Images and PDF are base64 text.

    Notebooks show it by itself: it has IPython's ``_repr_*_`` methods.
    """

    text: Optional[str] = None
    html: Optional[str] = None
    markdown: Optional[str] = None
    svg: Optional[str] = None
    png: Optional[str] = None
    jpeg: Optional[str] = None
    pdf: Optional[str] = None
    latex: Optional[str] = None
    json: Any = None
    javascript: Optional[str] = None
    data: Any = None
    chart: Optional[Chart] = None
    is_main_result: bool = False
    extra: Optional[Dict[str, Any]] = None

    @classmethod
    def of(cls, d: Mapping[str, Any]) -> "Result":
        known = {name: d.get(name) for name, _, _ in _FORMS}
        chart = d.get("chart")
        return cls(
            **known,
            data=d.get("data"),
            chart=Chart(chart) if isinstance(chart, dict) else None,
            is_main_result=bool(d.get("is_main_result")),
            extra=d.get("extra"),
        )

    def formats(self) -> Iterable[str]:
        """Returns the names of the forms that the value has."""
        names = [name for name, _, _ in _FORMS] + ["data", "chart"]
        return [n for n in names if getattr(self, n) is not None] + list(self.extra or {})

    def __getitem__(self, name: str) -> Any:
        if name.startswith("_") or name not in self.formats():
            raise KeyError(name)
        return (self.extra or {})[name] if name in (self.extra or {}) else getattr(self, name)

    def bytes_of(self, name: str) -> bytes:
        """Returns png, jpeg or pdf decoded."""
        value = getattr(self, name)
        if not isinstance(value, str):
            raise InvalidArgumentException(f"the result has no {name}")
        return base64.b64decode(value, validate=True)

    def to_dict(self) -> Dict[str, Any]:
        out = {n: self[n] for n in self.formats()}
        if isinstance(out.get("chart"), Chart):
            out["chart"] = out["chart"].to_dict()
        out["is_main_result"] = self.is_main_result
        return out

    def __str__(self) -> str:
        if self.text is not None:
            return f"Result({self.text})"
        return f"Result(formats: {', '.join(self.formats())})"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Dict[str, Any]:
        bundle: Dict[str, Any] = {}
        for name, media_type, _ in _FORMS:
            value = getattr(self, name)
            if value is not None:
                bundle[media_type] = value
        for media_type, value in (self.extra or {}).items():
            bundle.setdefault(media_type, value)
        if include:
            bundle = {k: v for k, v in bundle.items() if k in include}
        if exclude:
            bundle = {k: v for k, v in bundle.items() if k not in exclude}
        return bundle

    def _repr_html_(self) -> Optional[str]:
        return self.html

    def _repr_markdown_(self) -> Optional[str]:
        return self.markdown

    def _repr_svg_(self) -> Optional[str]:
        return self.svg

    def _repr_png_(self) -> Optional[str]:
        return self.png

    def _repr_jpeg_(self) -> Optional[str]:
        return self.jpeg

    def _repr_pdf_(self) -> Optional[str]:
        return self.pdf

    def _repr_latex_(self) -> Optional[str]:
        return self.latex

    def _repr_json_(self) -> Any:
        return self.json

    def _repr_javascript_(self) -> Optional[str]:
        return self.javascript


@dataclass
class Logs:
    """Output of code, in the pieces in which it came."""

    stdout: List[str] = field(default_factory=list)
    stderr: List[str] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps({"stdout": self.stdout, "stderr": self.stderr})


@dataclass
class Artifact:
    """A file that code wrote into its ``output_dir``."""

    path: str
    size: int
    media_type: str


@dataclass
class Execution:
    """The outcome of :meth:`sandboxd.Sandbox.run_code`.

    ``exit_code`` is that of the interpreter, of code that ran without a context; in a context it is
    1 after an error. ``timed_out`` says that the code was interrupted at its timeout.
    """

    results: List[Result] = field(default_factory=list)
    logs: Logs = field(default_factory=Logs)
    error: Optional[ExecutionError] = None
    execution_count: Optional[int] = None
    exit_code: int = 0
    timed_out: bool = False
    oom: bool = False
    #: Findings of code policies that did not refuse the code.
    findings: List[Finding] = field(default_factory=list)
    #: The operator's hook changed the code before it ran.
    amended: bool = False
    artifacts: List[Artifact] = field(default_factory=list)

    @property
    def text(self) -> Optional[str]:
        """Text of the last expression's value."""
        for r in self.results:
            if r.is_main_result:
                return r.text
        return None

    def to_json(self) -> str:
        return json.dumps(
            {
                "results": [r.to_dict() for r in self.results],
                "logs": {"stdout": self.logs.stdout, "stderr": self.logs.stderr},
                "error": json.loads(self.error.to_json()) if self.error else None,
            }
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Dict[str, Any]:
        for r in self.results:
            if r.is_main_result:
                return r._repr_mimebundle_(include, exclude)
        text = "".join(self.logs.stdout)
        return {"text/plain": text if text or not self.error else self.error.traceback}


@dataclass
class Context:
    """A process that keeps the variables of code between runs."""

    id: str
    language: str
    cwd: str
    state: str = "idle"
    execution_count: int = 0

    @classmethod
    def of(cls, d: Mapping[str, Any]) -> "Context":
        return cls(
            id=str(d.get("id", "")),
            language=str(d.get("language", "")),
            cwd=str(d.get("cwd", "")),
            state=str(d.get("state", "idle")),
            execution_count=int(d.get("execution_count", 0)),
        )


@dataclass
class Language:
    """A language of run_code. ``contexts`` says whether state can be kept between runs."""

    name: str
    aliases: List[str]
    file_name: str
    contexts: bool
    libraries: Optional[str]
    image: Optional[str]

    @classmethod
    def of(cls, d: Mapping[str, Any]) -> "Language":
        return cls(
            name=str(d.get("name", "")),
            aliases=list(d.get("aliases") or []),
            file_name=str(d.get("file_name", "")),
            contexts=bool(d.get("contexts")),
            libraries=d.get("libraries"),
            image=d.get("image"),
        )
