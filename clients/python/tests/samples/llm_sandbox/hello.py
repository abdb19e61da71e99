"""Run code in a session."""
from llm_sandbox import SandboxSession

with SandboxSession(lang="python", verbose=False) as session:
    result = session.run("print('Hello from the sandbox!')")
    print(result.stdout, result.exit_code)
# prints: Hello from the sandbox!
# prints:  0
