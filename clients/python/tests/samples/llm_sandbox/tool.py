"""The function that agent frameworks get as a tool."""
from llm_sandbox import SandboxSession


def run_code(lang, code, libraries=None):
    with SandboxSession(lang=lang, verbose=False) as session:
        return session.run(code, libraries).text


print(run_code("python", "print(sum(range(10)))"), end="")
# prints: 45
