#!/usr/bin/env python3
"""Builds the Python client (clients/python), with nothing but the standard library.

    pyclient.py sync          write package _sync from package _async
    pyclient.py check         fail if _sync is not what sync would write
    pyclient.py build [DIR]   write a wheel and an sdist to DIR (default build/clients)

The archives depend on the tree and SOURCE_DATE_EPOCH alone: same files, same bytes.
"""

import base64
import gzip
import hashlib
import io
import os
import re
import sys
import tarfile
import zipfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROJECT = os.path.join(ROOT, "clients", "python")
PACKAGE = os.path.join(PROJECT, "sandboxd")
TWINS = ("_client.py", "_code.py", "_commands.py", "_files.py", "_sandbox.py")

# _stream.py is written by hand for both: it is where the two differ.
WORDS = {
    "AsyncIterator": "Iterator",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
}


def sync_text(text):
    text = re.sub(r"\basync (def|with|for)\b", r"\1", text)
    text = re.sub(r"\bawait ", "", text)
    for old, new in WORDS.items():
        text = re.sub(rf"\b{old}\b", new, text)
    text = re.sub(r"\bAsync([A-Z])", r"\1", text)
    return "# Written by hack/pyclient.py from package _async.\n" + text


def twins():
    for name in TWINS:
        with open(os.path.join(PACKAGE, "_async", name), encoding="utf-8") as f:
            yield os.path.join(PACKAGE, "_sync", name), sync_text(f.read())


def sync():
    for path, text in twins():
        with open(path, "w", encoding="utf-8") as f:
            f.write(text)


def check():
    for path, text in twins():
        try:
            with open(path, encoding="utf-8") as f:
                same = f.read() == text
        except FileNotFoundError:
            same = False
        if not same:
            sys.exit(f"{os.path.relpath(path, ROOT)} is not made from _async: run hack/pyclient.py sync")


def read(*parts):
    with open(os.path.join(PROJECT, *parts), "rb") as f:
        return f.read()


def version():
    m = re.search(r'^__version__ = "([0-9][0-9a-z.]*)"$', read("sandboxd", "__init__.py").decode(), re.M)
    if m is None:
        sys.exit("clients/python/sandboxd/__init__.py: no __version__")
    return m.group(1)


def sources():
    """Returns the files of the package, relative to the project, in order."""
    out = []
    for directory, names, files in os.walk(PACKAGE):
        names[:] = sorted(n for n in names if n != "__pycache__")
        for name in sorted(files):
            if name.endswith(".py") or name == "py.typed":
                out.append(os.path.relpath(os.path.join(directory, name), PROJECT))
    return sorted(out)


def metadata():
    return (
        "Metadata-Version: 2.1\n"
        "Name: sandboxd\n"
        f"Version: {version()}\n"
        "Summary: Client of sandboxd: sandboxes for programs and code\n"
        "License: Apache-2.0\n"
        "Requires-Python: >=3.9\n"
        "Classifier: Typing :: Typed\n"
        "Description-Content-Type: text/markdown\n"
        "\n"
    ).encode() + read("README.md")


def when():
    # 1980 is the first year that a zip can hold.
    return max(int(os.environ.get("SOURCE_DATE_EPOCH", "315532800")), 315532800)


def wheel(directory):
    import time

    info = f"sandboxd-{version()}.dist-info"
    with open(os.path.join(ROOT, "LICENSE"), "rb") as f:
        licence = f.read()
    files = [(name, read(name)) for name in sources()]
    files += [
        (f"{info}/LICENSE", licence),
        (f"{info}/METADATA", metadata()),
        (f"{info}/WHEEL", b"Wheel-Version: 1.0\nGenerator: sandboxd\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
    ]
    record = ""
    for name, data in files:
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    files.append((f"{info}/RECORD", (record + f"{info}/RECORD,,\n").encode()))
    path = os.path.join(directory, f"sandboxd-{version()}-py3-none-any.whl")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in files:
            entry = zipfile.ZipInfo(name, time.gmtime(when())[:6])
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # Unix, for the mode
            entry.external_attr = 0o100644 << 16
            z.writestr(entry, data)
    return path


def sdist(directory):
    base = f"sandboxd-{version()}"
    with open(os.path.join(ROOT, "LICENSE"), "rb") as f:
        licence = f.read()
    files = [(name, read(name)) for name in ["README.md", "pyproject.toml", *sources()]]
    files += [("LICENSE", licence), ("PKG-INFO", metadata())]
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w", format=tarfile.PAX_FORMAT) as t:
        for name, data in sorted(files):
            entry = tarfile.TarInfo(f"{base}/{name}")
            entry.size, entry.mode, entry.mtime = len(data), 0o644, when()
            t.addfile(entry, io.BytesIO(data))
    path = os.path.join(directory, base + ".tar.gz")
    with open(path, "wb") as f, gzip.GzipFile("", "wb", 9, f, when()) as z:
        z.write(tar.getvalue())
    return path


def main():
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    if what == "sync":
        sync()
    elif what == "check":
        check()
    elif what == "build":
        check()
        directory = sys.argv[2] if len(sys.argv) > 2 else os.path.join(ROOT, "build", "clients")
        os.makedirs(directory, exist_ok=True)
        print(wheel(directory))
        print(sdist(directory))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
