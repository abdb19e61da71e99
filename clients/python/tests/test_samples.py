"""Programs that are written for the other systems, with only the import changed.

A file of samples/ imports the other system's package. Its last lines, "# prints: …", are the output
that it must have; … stands for anything.
"""

import os
import re
import subprocess
import sys
import tempfile
import unittest

from .support import HUNG

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "samples")

#: The change of the import, by package.
IMPORTS = {
    "e2b_code_interpreter": "sandboxd",
    "e2b": "sandboxd",
    "llm_sandbox": "sandboxd.llm_sandbox",
}
_IMPORT = re.compile(r"^(\s*from )(" + "|".join(IMPORTS) + r")((?:\.\w+)* import )", re.M)


def changed(text):
    """Returns a program with its imports changed, and how many were."""
    return _IMPORT.subn(lambda m: m.group(1) + IMPORTS[m.group(2)] + m.group(3), text)


def matches(want, got):
    pattern = ".*?".join(re.escape(part) for part in want.split("…"))
    return re.fullmatch(pattern, got, re.S) is not None


def run(program, text, directory):
    with open(os.path.join(directory, "program.py"), "w", encoding="utf-8") as f:
        f.write(text)
    environment = dict(os.environ, PYTHONPATH=os.path.dirname(os.path.dirname(ROOT)))
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        timeout=HUNG,
    )
    if done.returncode != 0:
        raise AssertionError(f"{program} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


class Samples(unittest.TestCase):
    pass


def sample(path):
    def test(self):
        with open(path, encoding="utf-8") as f:
            text = f.read()
        want = "".join(line + "\n" for line in re.findall(r"^# prints: ?(.*)$", text, re.M))
        self.assertTrue(want, "the sample prints nothing")
        text, n = changed(text)
        self.assertTrue(n, "the sample imports none of the systems")
        with tempfile.TemporaryDirectory() as directory:
            got = run(path, text, directory)
        if not matches(want, got):
            self.fail(f"printed:\n{got}\nwanted:\n{want}")

    return test


for directory, _, names in sorted(os.walk(ROOT)):
    for name in sorted(names):
        if name.endswith(".py"):
            label = f"test_{os.path.basename(directory)}_{name[:-3]}"
            setattr(Samples, label, sample(os.path.join(directory, name)))
