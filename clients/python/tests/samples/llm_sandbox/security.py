"""A policy that judges code before it runs."""
from llm_sandbox import SandboxSession
from llm_sandbox.security import (
    RestrictedModule,
    SecurityIssueSeverity,
    SecurityPattern,
    SecurityPolicy,
)

policy = SecurityPolicy(
    severity_threshold=SecurityIssueSeverity.MEDIUM,
    patterns=[SecurityPattern(pattern=r"\bos\.system\s*\(", description="Shell", severity=SecurityIssueSeverity.HIGH)],
    restricted_modules=[RestrictedModule(name="subprocess", description="Processes", severity=SecurityIssueSeverity.HIGH)],
)
with SandboxSession(lang="python", security_policy=policy) as session:
    for code in ("print(1)", "import os\nos.system('ls')", "import subprocess"):
        safe, violations = session.is_safe(code)
        print(safe, [v.description for v in violations])
        if safe:
            print(session.run(code).stdout.strip())
# prints: True []
# prints: 1
# prints: False ['Shell']
# prints: False ['Processes']
