"""Another language."""
from llm_sandbox import SandboxSession
from llm_sandbox.exceptions import LanguageNotSupportedError

try:
    SandboxSession(lang="brainfuck")
except LanguageNotSupportedError as e:
    print(e)
with SandboxSession(lang="BASH") as session:
    print(session.run("echo hi").stdout, end="")
# prints: Language brainfuck is not supported
# prints: hi
