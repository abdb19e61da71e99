"""Builds the wheel and the sdist, with nothing but the standard library.

It is the package's build backend (PEP 517), so that pip needs neither a network nor setuptools.
The archives depend on the files and SOURCE_DATE_EPOCH alone: same files, same bytes.
"""

import base64
import gzip
import hashlib
import io
import os
import re
import sys
import tarfile
import time
import zipfile

PROJECT = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.join(PROJECT, "sandboxd")


def licence():
    for directory in (PROJECT, os.path.dirname(os.path.dirname(PROJECT))):
        path = os.path.join(directory, "LICENSE")
        if os.path.exists(path):
            with open(path, "rb") as f:
                return f.read()
    sys.exit("LICENSE is missing")


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
    info = f"sandboxd-{version()}.dist-info"
    files = [(name, read(name)) for name in sources()]
    files += [
        (f"{info}/LICENSE", licence()),
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
    files = [(name, read(name)) for name in ["README.md", "backend.py", "pyproject.toml", *sources()]]
    files += [("LICENSE", licence()), ("PKG-INFO", metadata())]
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


# The hooks of PEP 517.


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    return os.path.basename(wheel(wheel_directory))


def build_sdist(sdist_directory, config_settings=None):
    return os.path.basename(sdist(sdist_directory))


def get_requires_for_build_wheel(config_settings=None):
    return []


def get_requires_for_build_sdist(config_settings=None):
    return []
