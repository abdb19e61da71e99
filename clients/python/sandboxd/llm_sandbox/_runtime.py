"""What Docker's arguments of a container mean for a sandbox."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping

from ..exceptions import InvalidArgumentException
from ..models import parse_size
from .exceptions import ExtraArgumentsError, ValidationError

#: Arguments that change nothing here, with the values for which that is so; None means any.
_NEUTRAL: Dict[str, Any] = {
    "detach": None,
    "tty": None,
    "stdin_open": None,
    "remove": None,
    "auto_remove": None,
    "privileged": (False,),
    "init": None,
    "command": (None,),
    "network_disabled": (False,),
}


def creation(configs: Mapping[str, Any]) -> Dict[str, Any]:
    """Returns arguments of Sandbox.create for runtime_configs.

    An argument that has no meaning here is an error: what was asked for is applied or refused.
    """
    out: Dict[str, Any] = {}
    limits: Dict[str, Any] = {}
    settings: Dict[str, Any] = {}
    c = dict(configs)
    for key, values in _NEUTRAL.items():
        if key in c and (values is None or c[key] in values):
            del c[key]
    try:
        _limits(c, limits)
    except InvalidArgumentException as e:
        raise ValidationError(f"runtime_configs: {e}") from e
    if c.pop("network_disabled", False):
        out["network"] = "none"
    if "network_mode" in c:
        mode = c.pop("network_mode")
        modes = {"none": "none", "bridge": "full", "default": "full", "full": "full"}
        if mode not in modes:
            raise ExtraArgumentsError(f"runtime_configs: network_mode {mode!r} is none of none and bridge")
        out["network"] = modes[mode]
    if "network" in c:
        out["network"] = c.pop("network")
    if "environment" in c:
        env = c.pop("environment")
        out["envs"] = dict(env if isinstance(env, Mapping) else (e.split("=", 1) for e in env))
    for key in ("user", "name"):
        if key in c:
            out[key] = str(c.pop(key))
    if "working_dir" in c:
        out["cwd"] = c.pop("working_dir")
    if "labels" in c:
        out["metadata"] = dict(c.pop("labels"))
    for key in ("cap_add", "cap_drop", "hostname", "read_only", "shm_size"):
        if key in c:
            settings[key] = c.pop(key)
    if "shm_size" in settings:
        settings["shm_size"] = parse_size(settings["shm_size"], "shm_size")
    if "tmpfs" in c:
        settings["tmpfs"] = [_tmpfs(path, options) for path, options in dict(c.pop("tmpfs")).items()]
    mounts: List[Dict[str, Any]] = []
    for source, spec in _volumes(c.pop("volumes", {})).items():
        mounts.append(_mount(source, spec.get("bind"), spec.get("mode") == "ro"))
    for m in c.pop("mounts", []):
        m = {str(k).lower(): v for k, v in dict(m).items()}
        mounts.append(_mount(m.get("source", ""), m.get("target"), bool(m.get("readonly") or m.get("read_only"))))
    if mounts:
        settings["mounts"] = mounts
    for option in c.pop("security_opt", []) or []:
        # Neither set-user-ID programs nor others gain privileges in any sandbox.
        if option not in ("no-new-privileges", "no-new-privileges:true"):
            raise ExtraArgumentsError(f"runtime_configs: security_opt {option!r} has no meaning here; see profile=")
    if "ports" in c:
        out["ports"] = [_port(inside, outside) for inside, outside in dict(c.pop("ports")).items()]
    if c:
        raise ExtraArgumentsError(f"runtime_configs: {', '.join(sorted(c))}: no meaning here")
    if limits:
        out["limits"] = limits
    if settings:
        out["settings"] = settings
    return out


def _limits(c: Dict[str, Any], limits: Dict[str, Any]) -> None:
    if "mem_limit" in c:
        limits["memory"] = parse_size(c.pop("mem_limit"), "mem_limit")
    if "memswap_limit" in c:
        total = c.pop("memswap_limit")  # Docker's counts memory and swap together
        if total != -1:
            limits["swap"] = max(0, parse_size(total, "memswap_limit") - limits.get("memory", 0))
    if "cpu_quota" in c:
        limits["cpus"] = c.pop("cpu_quota") / c.pop("cpu_period", 100_000)
    elif "cpu_period" in c:
        raise ExtraArgumentsError("runtime_configs: cpu_period means nothing without cpu_quota")
    if "nano_cpus" in c:
        limits["cpus"] = c.pop("nano_cpus") / 1e9
    for key in ("cpus", "cpu_count"):
        if key in c:
            limits["cpus"] = float(c.pop(key))
    if "cpu_shares" in c:
        # The kernel's own conversion of a share of cgroup v1 to a weight of v2.
        shares = int(c.pop("cpu_shares"))
        limits["cpu_weight"] = max(1, min(10_000, 1 + (shares - 2) * 9999 // 262_142))
    if "cpuset_cpus" in c:
        limits["cpuset"] = c.pop("cpuset_cpus")
    if "pids_limit" in c:
        pids = c.pop("pids_limit")
        if pids > 0:
            limits["pids"] = pids


def _tmpfs(path: str, options: str) -> Dict[str, Any]:
    out: Dict[str, Any] = {"path": path, "size": 64 << 20, "mode": 0o1777}
    for option in filter(None, (options or "").split(",")):
        name, _, value = option.partition("=")
        if name == "size":
            out["size"] = parse_size(value, "tmpfs size")
        elif name == "mode":
            out["mode"] = int(value, 8)
        elif name == "noexec":
            out["noexec"] = True
        elif name not in ("rw", "nosuid", "nodev"):  # they hold for every file system of a sandbox
            raise ExtraArgumentsError(f"runtime_configs: tmpfs option {option!r} has no meaning here")
    return out


def _volumes(volumes: Any) -> Dict[str, Dict[str, Any]]:
    if isinstance(volumes, Mapping):
        return {str(k): dict(v) if isinstance(v, Mapping) else {"bind": v} for k, v in volumes.items()}
    out = {}
    for text in volumes or []:
        source, _, rest = str(text).partition(":")
        target, _, mode = rest.partition(":")
        out[source] = {"bind": target, "mode": mode}
    return out


def _mount(source: str, target: Any, read_only: bool) -> Dict[str, Any]:
    if not target:
        raise ValidationError(f"runtime_configs: the mount of {source!r} has no target")
    out = {"type": "bind" if source.startswith("/") else "volume", "source": source, "target": target}
    return {**out, "read_only": True} if read_only else out


def _port(inside: Any, outside: Any) -> Dict[str, Any]:
    number, _, protocol = str(inside).partition("/")
    out: Dict[str, Any] = {"port": int(number), "host_port": 0}
    if protocol:
        out["protocol"] = protocol
    if isinstance(outside, (tuple, list)):
        out["address"], outside = outside
    if outside:
        out["host_port"] = int(outside)
    return out
