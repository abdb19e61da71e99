"""Commands in the foreground and background, with streaming."""
from e2b import CommandExitException, Sandbox, TimeoutException

sbx = Sandbox.create(timeout=60, envs={"FOO": "bar"})
print(sbx.commands.run("echo $FOO").stdout, end="")
print(sbx.commands.run("echo $FOO", envs={"FOO": "own"}).stdout, end="")
result = sbx.commands.run("echo hi; sleep 0.1; echo ho", on_stdout=lambda data: print("got", data, end=""))
try:
    sbx.commands.run("exit 42")
except CommandExitException as e:
    print(e.exit_code)
command = sbx.commands.run("echo begun; sleep 60", background=True)
for stdout, stderr, _ in command:
    print(stdout, end="")
    break
print(any(p.pid == command.pid for p in sbx.commands.list()))
print(command.kill())
try:
    sbx.commands.run("sleep 60", timeout=0.2)
except TimeoutException:
    print("timed out")
sbx.kill()
# prints: bar
# prints: own
# prints: got hi
# prints: got ho
# prints: 42
# prints: begun
# prints: True
# prints: True
# prints: timed out
