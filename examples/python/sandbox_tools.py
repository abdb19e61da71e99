"""Functions with which a model works in a sandbox.

Frameworks make tools of them: names, types and docstrings are what the model reads. A function
returns errors as text, so that the model sees them and tries something else.
"""

import functools

from sandboxd import CommandExitException, SandboxException, TimeoutException

#: Maximum number of characters of an answer, and seconds of a program.
MOST, TIMEOUT = 20000, 60


def told(function):
    """Decorates a function: its errors and long texts become answers that a model can use."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        try:
            text = function(*args, **kwargs)
        except TimeoutException as e:
            text = f"{e.stdout}{e.stderr}\n(ended after {TIMEOUT} seconds)"
        except SandboxException as e:
            text = f"error: {e}"
        if len(text) > MOST:
            half = MOST // 2
            text = f"{text[:half]}\n({len(text) - MOST} characters are left out)\n{text[-half:]}"
        return text

    return run


class SandboxTools:
    """The functions, for one sandbox."""

    def __init__(self, sandbox):
        self.sandbox = sandbox

    def all(self):
        return [self.run_code, self.shell, self.read_file, self.write_file]

    @told
    def run_code(self, code: str) -> str:
        """Run Python code in a sandbox. Return its output and the value of its last line.

        Variables, imports and files stay for the next call.

        Args:
            code: The source text.
        """
        run = self.sandbox.run_code(code, timeout=TIMEOUT)
        parts = run.logs.stdout + run.logs.stderr
        parts += [result.text or f"({', '.join(result.formats())})" for result in run.results]
        if run.error is not None:
            parts.append(run.error.traceback)
        return "".join(parts) or "(no output)"

    @told
    def shell(self, command: str) -> str:
        """Run a shell command in a sandbox. Return its output and its exit code, if that is not 0.

        Args:
            command: The command line.
        """
        try:
            run = self.sandbox.commands.run(command, timeout=TIMEOUT)
        except CommandExitException as e:
            return f"{e.stdout}{e.stderr}\n(exit code {e.exit_code})"
        return run.stdout + run.stderr or "(no output)"

    @told
    def read_file(self, path: str) -> str:
        """Return the text of a file of the sandbox.

        Args:
            path: The path of the file.
        """
        return bytes(self.sandbox.files.read(path, format="bytes")).decode("utf-8", "replace")

    @told
    def write_file(self, path: str, content: str) -> str:
        """Write a text file in the sandbox. Its directory is made if it is missing.

        Args:
            path: The path of the file.
            content: The whole text of the file.
        """
        return f"wrote {self.sandbox.files.write(path, content).path}"
