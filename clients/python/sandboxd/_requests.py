"""Bodies of requests from arguments: the part of the client that does no input or output."""

from __future__ import annotations

import base64
from typing import Any, Dict, List, Mapping, Optional, Sequence, Union

from .exceptions import CommandExitException, InvalidArgumentException, TimeoutException
from .models import Envs, _clean, env_list, parse_size

Command = Union[str, Sequence[str]]
NetworkOption = Union[str, Mapping[str, Any], None]
PortOption = Union[int, Mapping[str, Any]]

#: The smallest program of a language in which that is not an empty line.
NOTHING = {
    "go": "package main\n\nfunc main() {}\n",
    "cpp": "int main() {}\n",
    "c": "int main(void) { return 0; }\n",
    "java": "class Main { public static void main(String[] args) {} }\n",
}

_SIZES = ("memory", "memory_high", "swap", "disk")


def network(option: NetworkOption, allow_internet_access: Optional[bool]) -> Optional[Dict[str, Any]]:
    """Returns the network of a request, or None for the daemon's default."""
    if option is not None:
        if allow_internet_access is not None:
            raise InvalidArgumentException("network and allow_internet_access: give one of them")
        return {"mode": option} if isinstance(option, str) else dict(option)
    if allow_internet_access is None:
        return None
    return {"mode": "full" if allow_internet_access else "none"}


def limits(option: Optional[Mapping[str, Any]]) -> Dict[str, Any]:
    """Returns limits, whose sizes may be text such as "512m"."""
    out = dict(option or {})
    for name in _SIZES:
        if name in out:
            out[name] = parse_size(out[name], f"limits.{name}")
    return out


def port(option: PortOption) -> Dict[str, Any]:
    """Returns the publication of a port. A number is published at a free port of the host."""
    return {"port": option, "host_port": 0} if isinstance(option, int) else dict(option)


def creation(
    *,
    image: Optional[str],
    snapshot: Optional[str],
    timeout: Optional[float],
    idle_timeout: Optional[float],
    metadata: Optional[Mapping[str, str]],
    envs: Optional[Envs],
    network_option: NetworkOption,
    allow_internet_access: Optional[bool],
    limits_option: Optional[Mapping[str, Any]],
    ports: Optional[Sequence[PortOption]],
    name: Optional[str],
    user: Optional[str],
    cwd: Optional[str],
    profile: Optional[str],
    auto_remove: bool,
    settings: Optional[Mapping[str, Any]],
) -> Dict[str, Any]:
    """Returns the body of a creation."""
    if image is not None and snapshot is not None:
        raise InvalidArgumentException("image and snapshot: give one of them")
    if timeout is not None and idle_timeout is None and timeout > 0:
        idle_timeout = timeout  # who names a lifetime means it, also of a sandbox that is not used
    body = _clean(
        {
            "image": image,
            "snapshot": snapshot,
            "name": name,
            "env": env_list(envs),
            "cwd": cwd,
            "user": user,
            "labels": dict(metadata or {}),
            "profile": profile,
            "limits": limits(limits_option),
            "network": network(network_option, allow_internet_access),
            "ports": [port(p) for p in ports or ()],
            "timeout": timeout,
            "idle_timeout": idle_timeout,
            "auto_remove": auto_remove or None,
        }
    )
    for key, value in (settings or {}).items():
        if key in body:
            raise InvalidArgumentException(f"settings.{key}: is also given by a parameter")
        body[key] = value
    return body


def execution(
    argv: Sequence[str],
    *,
    envs: Optional[Envs],
    cwd: Optional[str],
    user: Optional[str],
    timeout: Optional[float],
    **more: Any,
) -> Dict[str, Any]:
    """Returns the body of an exec."""
    if timeout is not None and timeout < 0:
        raise InvalidArgumentException(f"timeout: {timeout} is negative")
    return _clean(
        {
            "argv": list(argv),
            "env": env_list(envs),
            "cwd": cwd,
            "user": user,
            "timeout": timeout or None,
            **more,
        }
    )


def stdin(data: Union[str, bytes, None]) -> Optional[str]:
    """Returns a program's whole input in the form of the API."""
    if data is None:
        return None
    return base64.b64encode(data.encode() if isinstance(data, str) else bytes(data)).decode()


def output(event: Mapping[str, Any]) -> bytes:
    """Returns the output of an event, in either form."""
    if event.get("data"):
        try:
            return base64.b64decode(event["data"], validate=True)
        except (ValueError, TypeError) as e:
            raise InvalidArgumentException(f"decode output: {e}") from e
    return str(event.get("text") or "").encode("utf-8", "surrogatepass")


class Ending:
    """How a program ended, from the exit of its last event."""

    def __init__(self, exit_: Mapping[str, Any]) -> None:
        self.code = int(exit_.get("code", 0))
        self.signal: Optional[str] = exit_.get("signal") or None
        self.oom = bool(exit_.get("oom"))
        self.timeout = bool(exit_.get("timeout"))

    @property
    def error(self) -> Optional[str]:
        if self.oom:
            return "the sandbox's memory was used up"
        if self.signal:
            return f"signal: {self.signal}"
        return f"exit status {self.code}" if self.code else None

    def check(self, stdout: str, stderr: str, dropped: int, timeout: Optional[float]) -> None:
        """Raises if the program was killed at its timeout or its exit code is not 0."""
        if self.timeout:
            after = f" of {timeout:g} s" if timeout else ""
            e = TimeoutException(f"the command was killed at its timeout{after}")
            e.stdout, e.stderr = stdout, stderr
            raise e
        if self.code != 0:
            raise CommandExitException(
                stdout, stderr, self.code, self.error, self.signal, self.oom, dropped
            )


def shell(cmd: Command, program: str) -> List[str]:
    """Returns the argv of a command: text is a shell's, a list is taken as it is."""
    if isinstance(cmd, str):
        if not cmd.strip():
            raise InvalidArgumentException("the command is empty")
        return [program, "-c", cmd]
    argv = list(cmd)
    if not argv:
        raise InvalidArgumentException("the command is empty")
    return argv




def path_field(name: str, path: str) -> Dict[str, str]:
    """Returns the field of a body with a path. A path that is no UTF-8 has another field.

    In Python, such a path has surrogates, as os.fsdecode makes them.
    """
    try:
        path.encode()
    except UnicodeEncodeError:
        raw = path.encode("utf-8", "surrogateescape")
        return {f"{name}_bytes": base64.b64encode(raw).decode()}
    return {name: path}
