"""A backend is named as ever."""
from llm_sandbox import SandboxBackend, SandboxSession

with SandboxSession(backend=SandboxBackend.DOCKER, lang="python", keep_template=True) as session:
    print(session.run("import sys; print('no', file=sys.stderr); sys.exit(2)"))
# prints: ConsoleOutput(exit_code=2, stderr='no\n', stdout='')
