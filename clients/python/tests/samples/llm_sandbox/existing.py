"""Use a sandbox that exists."""
from llm_sandbox import SandboxSession

with SandboxSession(lang="python") as first:
    first.run("open('/sandbox/x', 'w').write('kept')")
    with SandboxSession(container_id=first.container_id, lang="python") as second:
        print(second.run("print(open('/sandbox/x').read())").stdout, end="")
    print(first.run("print('open')").stdout, end="")
# prints: kept
# prints: open
