"""The exceptions that users of LLM Sandbox catch."""

from __future__ import annotations

from typing import Any, Optional, Sequence


class SandboxError(Exception):
    """Base of the errors of sessions."""


class ContainerError(SandboxError):
    """The sandbox could not be created, or is gone."""


class SecurityError(SandboxError):
    """A check of code failed."""


class SecurityViolationError(SecurityError):
    """The policy forbids the code or the library.

    ``violations`` are patterns, as of ``is_safe``.
    """

    def __init__(self, message: str = "", violations: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.violations = list(violations)


class ResourceError(SandboxError):
    """A limit cannot be applied, or was exceeded."""


class ValidationError(SandboxError):
    """An argument is wrong."""


class ExtraArgumentsError(ValidationError):
    """An argument has no meaning here."""


class InvalidRegexPatternError(ValidationError):
    """A pattern of the policy is no regular expression."""

    def __init__(self, pattern: str) -> None:
        super().__init__(f"Invalid regex pattern: {pattern}")


class LanguageNotSupportedError(SandboxError):
    """There is no such language, or the image does not have it."""

    def __init__(self, lang: str, reason: Optional[str] = None) -> None:
        super().__init__(reason or f"Language {lang} is not supported")


class ImageNotFoundError(SandboxError):
    """The image does not exist."""


class ImagePullError(SandboxError):
    """The registry did not give the image."""


class NotOpenSessionError(SandboxError):
    """The session is not open."""

    def __init__(self, message: str = "Session is not open. Call open() first, or use with.") -> None:
        super().__init__(message)


#: The name that pools have for it.
SessionNotOpenError = NotOpenSessionError


class LibraryInstallationNotSupportedError(SandboxError):
    """The language has no package manager, or the session may not install."""

    def __init__(self, lang: str) -> None:
        super().__init__(f"Library installation is not supported for {lang}")


class CommandEmptyError(SandboxError):
    """The command is empty."""

    def __init__(self) -> None:
        super().__init__("Command cannot be empty")


class CommandFailedError(SandboxError):
    """A command that had to succeed did not: an installation, for example."""

    def __init__(self, command: str, exit_code: int, output: str) -> None:
        super().__init__(f"Command {command} failed with exit code {exit_code}: {output}")
        self.command, self.exit_code, self.output = command, exit_code, output


class PackageManagerError(SandboxError):
    """The package manager failed."""


class UnsupportedBackendError(SandboxError):
    """There is no such backend."""

    def __init__(self, backend: Any) -> None:
        super().__init__(f"Unsupported backend: {backend}")


class MissingDependencyError(SandboxError):
    """Kept for callers that catch it: this client has no dependencies."""


class LanguageNotSupportPlotError(SandboxError):
    """The language has no plots that could be captured."""

    def __init__(self, lang: str) -> None:
        super().__init__(f"Language {lang} does not support plot detection")


class LanguageHandlerNotInitializedError(SandboxError):
    """Kept for callers that catch it."""


class DuplicateClientError(SandboxError):
    """A pool and a client of its own were given to one session."""


class SandboxTimeoutError(SandboxError):
    """The run was ended at its timeout, with every process of it.

    ``stdout`` and ``stderr`` hold its output until then.
    """

    def __init__(
        self,
        message: str = "Execution timed out",
        timeout_duration: Optional[float] = None,
        stdout: str = "",
        stderr: str = "",
    ) -> None:
        super().__init__(message)
        self.timeout_duration, self.stdout, self.stderr = timeout_duration, stdout, stderr


class PoolError(SandboxError):
    """Base of the errors of pools."""


class PoolExhaustedError(PoolError):
    """All sandboxes of the pool are in use."""


class PoolClosedError(PoolError):
    """The pool is closed."""
