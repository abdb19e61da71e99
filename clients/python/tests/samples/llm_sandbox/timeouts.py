"""A run is ended at its timeout, and the session goes on."""
from llm_sandbox import SandboxSession
from llm_sandbox.exceptions import SandboxTimeoutError

with SandboxSession(lang="python", execution_timeout=1) as session:
    try:
        session.run("while True: pass")
    except SandboxTimeoutError as e:
        print("timed out after", e.timeout_duration)
    print(session.run("print('goes on')", timeout=30).stdout, end="")
# prints: timed out after 1
# prints: goes on
