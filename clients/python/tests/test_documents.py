"""The programs of the documents run, and print what the documents say.

A block of "python" is a program; a block of "text" right after it is its output, where … stands for
anything. A comment "not run", with its reason, excuses a program.
"""

import os
import re
import tempfile
import unittest

from .test_samples import matches, run

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
DOCUMENTS = ("docs/guides/python.md", "clients/python/README.md")
_BLOCK = re.compile(r"(?<! -->\n)^```python\n(.*?)^```\n(?:\n?```text\n(.*?)^```$)?", re.M | re.S)


class Documents(unittest.TestCase):
    pass


def program(document, line, text, want):
    def test(self):
        with tempfile.TemporaryDirectory() as directory:
            with open(os.path.join(directory, "data.csv"), "w") as f:
                f.write("n\n1\n2\n")
            got = run(f"{document}:{line}", text, directory)
        if not matches(want, got):
            self.fail(f"{document}:{line} printed:\n{got}\nit says:\n{want}")

    return test


for document in DOCUMENTS:
    with open(os.path.join(ROOT, document), encoding="utf-8") as f:
        content = f.read()
    for m in _BLOCK.finditer(content):
        at = content.count("\n", 0, m.start()) + 1
        name = f"test_{re.sub('[^a-z]+', '_', document)}_{at}"
        setattr(Documents, name, program(document, at, m.group(1), m.group(2) or ""))
