"""Client of sandboxd: sandboxes for programs and code, over the daemon's Unix socket.

    from sandboxd import Sandbox

    with Sandbox.create() as sandbox:
        print(sandbox.commands.run("uname -a").stdout)

Sandbox and AsyncSandbox have the shape of E2B's SDK; sandboxd.llm_sandbox has that of LLM Sandbox.
"""

from ._async._agent import AsyncAgentRun
from ._async._commands import AsyncCommandHandle, AsyncCommands, AsyncPty
from ._async._files import AsyncFiles, AsyncWatchHandle
from ._async._sandbox import AsyncSandbox, AsyncSandboxPaginator
from ._sync._agent import AgentRun
from ._sync._commands import CommandHandle, Commands, Pty
from ._sync._files import Files, WatchHandle
from ._sync._sandbox import Sandbox, SandboxPaginator
from ._finding import Finding
from .exceptions import (
    AuthenticationException,
    CodeRefusedException,
    CommandExitException,
    ConflictException,
    ConnectionException,
    FileNotFoundException,
    InvalidArgumentException,
    LanguageNotFoundException,
    LibraryException,
    NotEnoughSpaceException,
    NotFoundException,
    ProgramNotFoundException,
    ProtocolException,
    RateLimitException,
    SandboxException,
    SandboxNotFoundException,
    TemplateException,
    TimeoutException,
    UnenforceableException,
)
from .models import (
    AgentEvent,
    AgentRunInfo,
    Artifact,
    Chart,
    CommandResult,
    Context,
    EntryInfo,
    Execution,
    ExecutionError,
    FilesystemEvent,
    FilesystemEventType,
    FileType,
    Language,
    Logs,
    OutputMessage,
    ProcessInfo,
    PtySize,
    Result,
    SandboxInfo,
    SandboxQuery,
    SandboxState,
    SnapshotInfo,
    WriteInfo,
)

#: The version of this package, which is the version of the API that it speaks.
__version__ = "1.0.0"

__all__ = [
    "AgentEvent",
    "AgentRun",
    "AgentRunInfo",
    "AsyncAgentRun",
    "Artifact",
    "AsyncCommandHandle",
    "AsyncCommands",
    "AsyncFiles",
    "AsyncPty",
    "AsyncSandbox",
    "AsyncSandboxPaginator",
    "AsyncWatchHandle",
    "AuthenticationException",
    "Chart",
    "CodeRefusedException",
    "CommandExitException",
    "CommandHandle",
    "CommandResult",
    "Commands",
    "ConflictException",
    "ConnectionException",
    "Context",
    "EntryInfo",
    "Execution",
    "ExecutionError",
    "FileNotFoundException",
    "Finding",
    "FileType",
    "Files",
    "FilesystemEvent",
    "FilesystemEventType",
    "InvalidArgumentException",
    "Language",
    "LanguageNotFoundException",
    "LibraryException",
    "Logs",
    "NotEnoughSpaceException",
    "NotFoundException",
    "OutputMessage",
    "ProcessInfo",
    "ProgramNotFoundException",
    "ProtocolException",
    "Pty",
    "PtySize",
    "RateLimitException",
    "Result",
    "Sandbox",
    "SandboxException",
    "SandboxInfo",
    "SandboxNotFoundException",
    "SandboxPaginator",
    "SandboxQuery",
    "SandboxState",
    "SnapshotInfo",
    "TemplateException",
    "TimeoutException",
    "UnenforceableException",
    "WatchHandle",
    "WriteInfo",
]
