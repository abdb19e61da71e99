"""Commands of a session."""
from llm_sandbox import SandboxSession

with SandboxSession(lang="python") as session:
    print(session.execute_command("python3 -c 'print(6 * 7)'").stdout, end="")
    result = session.execute_commands(["mkdir -p /sandbox/out", ("pwd", "/sandbox/out")])
    print(result.stdout, end="")
# prints: 42
# prints: /sandbox/out
