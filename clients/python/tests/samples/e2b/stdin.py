"""Input of a background command."""
from e2b import Sandbox

with Sandbox.create() as sandbox:
    command = sandbox.commands.run("read name; echo Hello, $name", background=True, stdin=True)
    sandbox.commands.send_stdin(command.pid, "you\n")
    print(command.wait().stdout, end="")
# prints: Hello, you
