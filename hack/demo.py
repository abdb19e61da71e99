#!/usr/bin/env python3
"""Writes docs/demo.svg: a terminal in which the commands below ran, with the real binaries of bin/.

    make build && hack/demo.py

The daemon is this script's own, in a directory that is removed at the end.
"""
import html
import os
import pathlib
import re
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMMANDS = [
    "# an image of the host's own /usr, read-only: nothing to pull",
    "sandboxd run -- python3 -c 'print(6 * 7)'",
    "# no way to gain privileges, a system call filter, few capabilities",
    "sandboxd run -- grep -E '^(NoNewPrivs|Seccomp|CapBnd):' /proc/self/status",
    "# a timeout that kills everything that the program started",
    "sandboxd run --timeout 1s -- sh -c 'sleep 600 & sleep 600'; echo \"exit code $?\"",
    "# twenty sandboxes with the files of one",
    "sandboxd create --name work >/dev/null; sandboxd exec work -- sh -c 'seq 1000000 > /tmp/data'",
    "time sandboxd fork -n 20 work | wc -l",
    "sandboxd rm --all | wc -l",
]
WIDTH, ROW, LEFT, TOP, SECONDS = 920, 20, 18, 46, 30
COLUMNS = 108


def run(command, env):
    """Returns the lines that bash prints, and the seconds that it took."""
    began = time.monotonic()
    done = subprocess.run(["bash", "-c", "TIMEFORMAT='%R seconds'; " + command], env=env, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True, timeout=60)
    return done.stdout.splitlines(), time.monotonic() - began


def record(work):
    env = {"PATH": f"{ROOT}/bin:/usr/bin:/bin", "HOME": work, "LANG": "C.UTF-8", "SANDBOXD_SOCKET": f"{work}/run/api.sock"}
    daemon = subprocess.Popen([f"{ROOT}/bin/sandboxd", "serve", "--data-dir", f"{work}/data", "--runtime-dir", f"{work}/run"],
                              env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            if subprocess.run(["sandboxd", "ps"], env=env, capture_output=True, check=False).returncode == 0:
                break
            time.sleep(0.1)
        run("sandboxd run -- true", env)  # the host image's layer is made once
        for command in COMMANDS:
            yield (command, [], 0.0) if command.startswith("#") else (command, *run(command, env))
        run("sandboxd shutdown", env)
        daemon.wait(30)
    finally:
        daemon.kill()
        daemon.wait()


def wrapped(text, first):
    """Cuts a long line as a terminal would."""
    lines = [text[:COLUMNS - len(first)]]
    rest = text[len(lines[0]):]
    lines += [rest[i:i + COLUMNS] for i in range(0, len(rest), COLUMNS)]
    return lines


def render(steps):
    rows, at = [], 0.6  # (time, class, text)
    for command, output, took in steps:
        kind = "comment" if command.startswith("#") else "command"
        for i, text in enumerate(wrapped(command, "$ ")):
            rows.append((at, kind, ("$ " if i == 0 and kind == "command" else "") + text))
        at += 0.5 if kind == "comment" else 1.0
        at += min(took, 2.0)
        for line in output:
            for text in wrapped(line, ""):
                rows.append((at, "output", text))
        at += 1.6 if output else 0.3
    scale = min(1.0, (SECONDS - 4) / at)
    height = TOP + ROW * len(rows) + 16
    css, body = [], []
    for n, (when, kind, text) in enumerate(rows):
        start = when * scale / SECONDS * 100
        css.append(f"@keyframes r{n}{{0%,{start:.2f}%{{opacity:0}}{start + 0.01:.2f}%,100%{{opacity:1}}}}#r{n}{{animation:r{n} {SECONDS}s infinite}}")
        body.append(f'<text id="r{n}" class="{kind}" x="{LEFT}" y="{TOP + ROW * n + 14}" xml:space="preserve">{html.escape(text)}</text>')
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">
<title>Commands of sandboxd in a terminal</title>
<!-- Made by hack/demo.py. -->
<style>
text{{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#d0d7de}}
.command{{fill:#ffffff;font-weight:600}}.comment{{fill:#7d8590}}
{chr(10).join(css)}
@media (prefers-reduced-motion:reduce){{text{{animation:none!important}}}}
</style>
<rect width="{WIDTH}" height="{height}" rx="8" fill="#0d1117"/>
<circle cx="22" cy="20" r="6" fill="#ff5f56"/><circle cx="42" cy="20" r="6" fill="#ffbd2e"/><circle cx="62" cy="20" r="6" fill="#27c93f"/>
{chr(10).join(body)}
</svg>
"""


def main():
    with tempfile.TemporaryDirectory(prefix="sandboxd-demo-", dir="/var/tmp") as work:
        os.chmod(work, 0o755)
        try:
            steps = [(c, [re.sub(re.escape(work), "~", line) for line in out], took) for c, out, took in record(work)]
        finally:  # layers belong to subordinate ids
            subprocess.run(["unshare", "--user", "--map-auto", "--map-root-user", "rm", "-rf", f"{work}/data"], check=False, capture_output=True)
    (ROOT / "docs/demo.svg").write_text(render(steps), encoding="utf-8")


if __name__ == "__main__":
    main()
