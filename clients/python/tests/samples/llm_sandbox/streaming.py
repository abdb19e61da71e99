"""Output as it comes, and the right exit code."""
from llm_sandbox import SandboxSession

with SandboxSession(lang="python") as session:
    result = session.run(
        "for i in range(3):\n    print(i, flush=True)\nraise SystemExit(4)",
        on_stdout=lambda chunk: print(chunk, end=""),
    )
    print("exit", result.exit_code)
# prints: 0
# prints: 1
# prints: 2
# prints: exit 4
