"""Exceptions of the client. Their names are those that users of E2B's SDK catch."""

from __future__ import annotations

from typing import Any, Mapping, Optional, Sequence

from ._finding import Finding


class SandboxException(Exception):
    """Base of all errors of this package.

    ``code`` is the daemon's error code (docs/reference/errors.md), or None if the error is the
    client's. ``hint`` names a remedy.
    """

    def __init__(
        self, message: str = "", code: Optional[str] = None, hint: Optional[str] = None
    ) -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.code = code
        self.hint = hint


class ConnectionException(SandboxException):
    """The daemon cannot be reached, or it ended the connection before its answer was complete."""


class CodeRefusedException(SandboxException):
    """A code policy or the operator's hook refuses the code. It did not run."""

    #: Findings of the policies, as :class:`sandboxd.Finding`.
    findings: Sequence[Finding] = ()


class ProtocolException(SandboxException):
    """The answer is not one of the daemon's API."""


class TimeoutException(SandboxException):
    """A time ran out: that of a command or of code, or a request's own.

    A command that ran into its timeout is killed with every process that it started. ``stdout``
    and ``stderr`` hold its output until then.
    """

    stdout: str = ""
    stderr: str = ""


class InvalidArgumentException(SandboxException):
    """The request is wrong. Repeating it does not help."""


class NotFoundException(SandboxException):
    """The sandbox, file, image, context or process does not exist."""


class SandboxNotFoundException(NotFoundException):
    """The sandbox does not exist, or it ended during the request."""


class FileNotFoundException(NotFoundException):
    """The file does not exist in the sandbox."""


class ConflictException(SandboxException):
    """The name is taken, or the state of the sandbox does not allow the request."""


class NotEnoughSpaceException(SandboxException):
    """The request or the answer exceeds a bound."""


class AuthenticationException(SandboxException):
    """The daemon does not serve this user."""


class TemplateException(SandboxException):
    """The image cannot be used: the registry has no such image, or its content is invalid."""


class UnenforceableException(SandboxException):
    """This host cannot apply a requested limit. The daemon created nothing."""


class ProgramNotFoundException(SandboxException):
    """The sandbox has no such program, or the program is not executable."""


class LanguageNotFoundException(SandboxException):
    """The sandbox's image has no program that runs the language. ``hint`` names an image."""


class LibraryException(SandboxException):
    """A package manager failed. The message ends with its output."""


class RateLimitException(SandboxException):
    """Kept for callers that catch it: the daemon has no rate limit."""


class CommandExitException(SandboxException):
    """A command ended with another exit code than 0.

    It has the fields of :class:`sandboxd.CommandResult`.
    """

    def __init__(
        self,
        stdout: str,
        stderr: str,
        exit_code: int,
        error: Optional[str] = None,
        signal: Optional[str] = None,
        oom: bool = False,
        dropped: int = 0,
    ) -> None:
        super().__init__(
            f"Command exited with code {exit_code} and error:\n{stderr or error or ''}"
        )
        self.stdout = stdout
        self.stderr = stderr
        self.exit_code = exit_code
        self.error = error
        self.signal = signal
        self.oom = oom
        self.dropped = dropped


_BY_CODE = {
    "invalid_argument": InvalidArgumentException,
    "too_large": NotEnoughSpaceException,
    "forbidden": AuthenticationException,
    "not_found": NotFoundException,
    "already_exists": ConflictException,
    "conflict": ConflictException,
    "gone": SandboxNotFoundException,
    "program_not_found": ProgramNotFoundException,
    "program_not_allowed": ProgramNotFoundException,
    "language_not_found": LanguageNotFoundException,
    "install_failed": LibraryException,
    "code_refused": CodeRefusedException,
    "unenforceable": UnenforceableException,
    "registry_error": TemplateException,
    "image_invalid": TemplateException,
    "build_failed": TemplateException,
    "unavailable": ConnectionException,
}


def from_problem(problem: Mapping[str, Any]) -> SandboxException:
    """Returns the exception for a problem document of the daemon."""
    code = str(problem.get("code", ""))
    detail = str(problem.get("detail") or problem.get("title") or code or "unknown error")
    hint = problem.get("hint")
    kind = _BY_CODE.get(code, SandboxException)
    e = kind(detail, code=code or None, hint=str(hint) if hint else None)
    if isinstance(e, CodeRefusedException):
        e.findings = [Finding.of(d) for d in problem.get("findings") or []]
    return e
