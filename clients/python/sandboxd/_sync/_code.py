# Written by hack/pyclient.py from package _async.
"""Runs of code, and contexts."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any, Dict, List, Mapping, Optional, Sequence, Union

from .. import _requests
from .._finding import Finding
from ..exceptions import (
    ConnectionException,
    InvalidArgumentException,
    LibraryException,
    NotFoundException,
    ProtocolException,
    SandboxNotFoundException,
    TimeoutException,
    from_problem,
)
from ..models import (
    OWN_LABELS,
    Artifact,
    Context,
    Envs,
    Execution,
    ExecutionError,
    Language,
    OutputMessage,
    Result,
    _clean,
    env_list,
    parse_time,
)
from ._client import NDJSON, Client
from ._commands import Decoder
from ._stream import Callback, Lock, call

#: Seconds after which code is interrupted if its caller names no timeout.
DEFAULT_CODE_TIMEOUT = 300.0


class Code:
    """What runs code in one sandbox."""

    def __init__(self, client: Client, sandbox_id: str) -> None:
        self._client = client
        self._id = sandbox_id
        self._defaults: Dict[str, str] = {}  # context that run_code uses, by language
        self._languages: Optional[List[Language]] = None
        self._lock = Lock()

    def languages(self) -> List[Language]:
        if self._languages is None:
            answer = self._client.call("GET", "v1", "languages")
            self._languages = [Language.of(d) for d in answer.get("languages") or []]
        return self._languages

    def language(self, name: Optional[str]) -> Language:
        """Returns a language by its name or an alias."""
        wanted = (name or "python").lower()
        known = self.languages()
        for lang in known:
            if wanted == lang.name or wanted in lang.aliases:
                return lang
        raise InvalidArgumentException(
            f"language {name!r}: there is " + ", ".join(lang.name for lang in known)
        )

    def create_context(self, **options: Any) -> Context:
        body = _clean(options)
        return Context.of(
            self._client.call("POST", "v1", "sandboxes", self._id, "contexts", document=body)
        )

    def contexts(self) -> List[Context]:
        answer = self._client.call("GET", "v1", "sandboxes", self._id, "contexts")
        return [Context.of(d) for d in answer.get("contexts") or []]

    def default_context(self, language: str) -> str:
        """Returns the context of runs that name none. A label of the sandbox holds its id.

        So every client of the sandbox, and a later one, has the same variables.
        """
        with self._lock:
            if language in self._defaults:
                return self._defaults[language]
            label = f"{OWN_LABELS}context.{language}"
            sandbox = self._client.call("GET", "v1", "sandboxes", self._id)
            found = (sandbox.get("labels") or {}).get(label)
            if not found or found not in [c.id for c in self.contexts()]:
                found = (self.create_context(language=language)).id
                self._client.call(
                    "PATCH", "v1", "sandboxes", self._id, document={"labels": {label: found}}
                )
            self._defaults[language] = found
            return found

    def run(
        self,
        code: str,
        language: Optional[str],
        context: Union[Context, str, None],
        stateless: bool,
        on_stdout: Optional[Callback[OutputMessage]],
        on_stderr: Optional[Callback[OutputMessage]],
        on_result: Optional[Callback[Result]],
        on_error: Optional[Callback[ExecutionError]],
        envs: Optional[Envs],
        timeout: Optional[float],
        libraries: Optional[Sequence[str]],
        more: Mapping[str, Any],
        request_timeout: Optional[float],
    ) -> Execution:
        body: Dict[str, Any] = {"code": code, **more}
        implied = ""
        if context is not None:
            if language is not None:
                raise InvalidArgumentException("language and context: give one of them")
            body["context"] = context if isinstance(context, str) else context.id
        elif stateless:
            body["language"] = language or "python"
        else:
            lang = self.language(language)
            if lang.contexts:
                implied = lang.name
                body["context"] = self.default_context(lang.name)
            else:
                body["language"] = lang.name
        body.update(
            _clean(
                {"env": env_list(envs), "timeout": timeout or None, "libraries": list(libraries or [])}
            )
        )
        callbacks = (on_stdout, on_stderr, on_result, on_error)
        try:
            return self._stream(body, callbacks, timeout, request_timeout)
        except SandboxNotFoundException:
            raise
        except NotFoundException:
            if not implied or self._defaults.get(implied) != body["context"]:
                raise
            del self._defaults[implied]  # another client has deleted it
        body["context"] = self.default_context(implied)
        return self._stream(body, callbacks, timeout, request_timeout)

    def install(
        self,
        libraries: Sequence[str],
        language: str,
        library_dir: Optional[str],
        timeout: Optional[float],
    ) -> None:
        """Installs libraries: it is a run of the smallest program with them."""
        lang = self.language(language)
        run = self._stream(
            _clean(
                {
                    "code": _requests.NOTHING.get(lang.name, "\n"),
                    "language": lang.name,
                    "libraries": list(libraries),
                    "library_dir": library_dir,
                    "timeout": timeout or None,
                }
            ),
            (None, None, None, None),
            timeout,
            None,
        )
        if run.exit_code != 0:
            raise LibraryException(
                f"install {', '.join(libraries)}: {''.join(run.logs.stderr)}", code="install_failed"
            )

    def _stream(
        self,
        body: Mapping[str, Any],
        callbacks: Sequence[Any],
        timeout: Optional[float],
        request_timeout: Optional[float],
    ) -> Execution:
        on_stdout, on_stderr, on_result, on_error = callbacks
        response = self._client.open(
            "POST",
            "v1",
            "sandboxes",
            self._id,
            "code",
            document=body,
            accept=NDJSON,
            request_timeout=request_timeout,
        )
        response.untimed()  # the code's own timeout bounds the rest
        run = Execution()
        out, err = Decoder(), Decoder()
        try:
            for event in response.lines():
                if event.get("problem"):
                    raise from_problem(event["problem"])
                kind = event.get("type")
                if event.get("execution_count"):
                    run.execution_count = int(event["execution_count"])
                if kind == "started":
                    run.findings = [Finding.of(d) for d in event.get("findings") or []]
                    run.amended = bool(event.get("amended"))
                elif kind == "stdout":
                    text = out.add(_requests.output(event))
                    if text:
                        run.logs.stdout.append(text)
                        call(on_stdout, OutputMessage(text, _nanoseconds(event)))
                elif kind == "stderr":
                    text = err.add(_requests.output(event))
                    if text:
                        run.logs.stderr.append(text)
                        call(on_stderr, OutputMessage(text, _nanoseconds(event), True))
                elif kind == "result":
                    result = Result.of(event.get("result") or {})
                    run.results.append(result)
                    call(on_result, result)
                elif kind == "error":
                    failure = event.get("failure") or {}
                    run.error = ExecutionError(
                        str(failure.get("name", "")),
                        str(failure.get("value", "")),
                        str(failure.get("traceback", "")),
                    )
                    call(on_error, run.error)
                elif kind == "end":
                    return self._end(run, event, timeout)
                else:
                    raise ProtocolException(f"an event of the unknown type {kind!r}")
        finally:
            response.close()
        raise ConnectionException("the daemon ended the stream without the end of the code")

    def _end(self, run: Execution, event: Mapping[str, Any], timeout: Optional[float]) -> Execution:
        end = _requests.Ending(event.get("exit") or {})
        run.exit_code, run.timed_out, run.oom = end.code, end.timeout, end.oom
        run.artifacts = [
            Artifact(str(a["path"]), int(a["size"]), str(a["media_type"])) for a in event.get("artifacts") or []
        ]
        if end.timeout:
            after = f" of {timeout:g} s" if timeout else ""
            e = TimeoutException(f"the code was ended at its timeout{after}")
            e.stdout, e.stderr = "".join(run.logs.stdout), "".join(run.logs.stderr)
            raise e
        return run


def _nanoseconds(event: Mapping[str, Any]) -> int:
    at = parse_time(event.get("time"))
    if at is None:
        return 0
    passed = at - datetime(1970, 1, 1, tzinfo=timezone.utc)
    return (passed.days * 86400 + passed.seconds) * 10**9 + passed.microseconds * 1000
