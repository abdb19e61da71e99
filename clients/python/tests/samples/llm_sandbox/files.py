"""Copy files in and out."""
import os

from llm_sandbox import SandboxSession

with open("data.txt", "w") as f:
    f.write("3\n4\n")
with SandboxSession(lang="python") as session:
    session.copy_to_runtime("data.txt", "/sandbox/data.txt")
    session.run(
        "total = sum(int(line) for line in open('/sandbox/data.txt'))\n"
        "open('/sandbox/total.txt', 'w').write(str(total))\n"
        "open('/sandbox/empty.txt', 'w')"
    )
    session.copy_from_runtime("/sandbox/total.txt", "total.txt")
    session.copy_from_runtime("/sandbox/empty.txt", "empty.txt")
print(open("total.txt").read(), os.path.getsize("empty.txt"))
# prints: 7 0
