#!/usr/bin/env python3
"""Builds the Python client (clients/python), with nothing but the standard library.

    pyclient.py sync          write package _sync from package _async
    pyclient.py check         fail if _sync is not what sync would write
    pyclient.py build [DIR]   write a wheel and an sdist to DIR (default build/clients)

The archives are made by the package's own build backend, clients/python/backend.py.
"""

import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROJECT = os.path.join(ROOT, "clients", "python")
PACKAGE = os.path.join(PROJECT, "sandboxd")
TWINS = ("_agent.py", "_client.py", "_code.py", "_commands.py", "_files.py", "_sandbox.py")

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
        sys.path.insert(0, PROJECT)
        import backend

        print(backend.wheel(directory))
        print(backend.sdist(directory))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
