"""Sessions that keep variables between runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Optional, Sequence, Union

from ..models import Context
from .data import ConsoleOutput
from .exceptions import LanguageNotSupportedError, NotOpenSessionError
from .session import BaseSession, Text, _console, _Errors


class KernelType(str, Enum):
    """The kernel of a session. IPython's features are there where the image has IPython."""

    IPYTHON = "ipython"


@dataclass
class InteractiveSettings:
    """Settings of a session."""

    kernel_type: KernelType = KernelType.IPYTHON
    max_memory: Optional[str] = None
    history_size: int = 1000
    timeout: Optional[float] = 300
    poll_interval: float = 0.1


class InteractiveSandboxSession(BaseSession):
    """A session that keeps variables between runs, in a context of the sandbox.

    ``max_memory`` limits the sandbox's memory, if it is given. ``history_size`` and
    ``poll_interval`` are accepted and change nothing: no file is polled.
    """

    def __init__(
        self,
        lang: str = "python",
        image: Optional[str] = None,
        *,
        kernel_type: Union[str, KernelType] = KernelType.IPYTHON,
        max_memory: Optional[str] = None,
        history_size: int = 1000,
        timeout: Optional[float] = 300,
        interactive_settings: Optional[InteractiveSettings] = None,
        **options: Any,
    ) -> None:
        settings = interactive_settings or InteractiveSettings(
            KernelType(kernel_type), max_memory, history_size, timeout
        )
        if settings.max_memory:
            options["limits"] = {**(options.get("limits") or {}), "memory": settings.max_memory}
        options.setdefault("default_timeout", settings.timeout)
        super().__init__(lang, image, **options)
        self.settings = settings
        self._context: Optional[Context] = None

    def open(self) -> None:
        if self.is_open:
            return
        super().open()
        try:
            known = {lang.name: lang for lang in self.sandbox.list_languages()}
            if self.lang in known and not known[self.lang].contexts:
                raise LanguageNotSupportedError(self.lang, f"{self.lang} keeps no variables between runs")
            with _Errors(self.lang):
                self._context = self.sandbox.create_code_context(cwd=self.workdir, language=self.lang)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._context = None
        super().close()

    def run(
        self,
        code: str,
        libraries: Optional[Sequence[str]] = None,
        timeout: Optional[float] = None,
        on_stdout: Optional[Text] = None,
        on_stderr: Optional[Text] = None,
        stdin: Any = None,
    ) -> ConsoleOutput:
        """Runs code with the variables of earlier runs.

        Its output ends with the value of the last expression, as IPython prints it. At the timeout
        the code is interrupted; variables stay.
        """
        if self._context is None:
            raise NotOpenSessionError()
        if libraries:
            self.install(libraries)
        out = self._run(code, None, timeout, on_stdout, on_stderr, context=self._context)
        console = _console(out)
        if out.text is not None:
            console.stdout += f"Out[{out.execution_count}]: {out.text}\n"
        return console

    def reset(self) -> None:
        """Begins anew, without variables."""
        if self._context is None:
            raise NotOpenSessionError()
        with _Errors(self.lang):
            self.sandbox.restart_code_context(self._context)

    def interrupt(self) -> None:
        """Interrupts what runs."""
        if self._context is None:
            raise NotOpenSessionError()
        with _Errors(self.lang):
            self.sandbox.interrupt_code_context(self._context)
