"""A terminal."""
from e2b import PtySize, Sandbox

sandbox = Sandbox.create()
terminal = sandbox.pty.create(PtySize(rows=24, cols=80))
sandbox.pty.send_stdin(terminal.pid, b"echo $((40 + 2))answer; exit\n")
data = []
terminal.wait(on_pty=data.append)
print(b"42answer" in b"".join(data))
sandbox.kill()
# prints: True
