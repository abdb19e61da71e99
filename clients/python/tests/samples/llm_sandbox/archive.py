"""An archive of the sandbox."""
import io
import tarfile

from llm_sandbox import SandboxSession

with SandboxSession(lang="python") as session:
    session.run("import os; os.mkdir('d'); open('d/x', 'w').write('1')")
    data, stat = session.get_archive("/sandbox/d")
    with tarfile.open(fileobj=io.BytesIO(data)) as t:
        print(sorted(n for n in t.getnames() if n.endswith("x")), stat["name"])
# prints: ['…x'] d
