"""Finds the daemon's socket, by the rule of api/client.DefaultSocket."""

from __future__ import annotations

import os
import stat


def default_socket() -> str:
    """Returns $SANDBOXD_SOCKET, else api.sock in the runtime directory."""
    path = os.environ.get("SANDBOXD_SOCKET")
    if path:
        return path
    uid = os.getuid()
    if uid == 0:
        return "/run/sandboxd/api.sock"
    for directory in (os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{uid}"):
        if not os.path.isabs(directory):
            continue
        try:
            st = os.lstat(directory)
        except OSError:
            continue
        if stat.S_ISDIR(st.st_mode) and st.st_uid == uid:
            return os.path.join(directory, "sandboxd", "api.sock")
    data = os.environ.get("XDG_DATA_HOME", "")
    if not os.path.isabs(data):
        data = os.path.join(os.environ.get("HOME", "/"), ".local", "share")
    return os.path.join(data, "sandboxd", "run", "api.sock")
