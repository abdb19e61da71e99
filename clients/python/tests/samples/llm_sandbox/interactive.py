"""Variables stay between runs."""
from llm_sandbox import InteractiveSandboxSession, KernelType

with InteractiveSandboxSession(lang="python", kernel_type=KernelType.IPYTHON) as session:
    session.run("total = 0")
    for n in (1, 2, 3):
        session.run(f"total += {n}")
    print(session.run("print(total)").stdout, end="")
# prints: 6
