"""Limits of a container."""
from llm_sandbox import SandboxSession

with SandboxSession(
    lang="python",
    runtime_configs={"pids_limit": 64, "environment": {"MODE": "test"}, "network_mode": "none"},
) as session:
    print(session.run("import os; print(os.environ['MODE'])").stdout, end="")
# prints: test
