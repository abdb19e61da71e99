"""Plots of a run."""
import base64

from llm_sandbox import ArtifactSandboxSession

code = """
class Plot:
    def _repr_svg_(self):
        return "<svg xmlns='http://www.w3.org/2000/svg'/>"

Plot()
"""
with ArtifactSandboxSession(lang="python") as session:
    result = session.run(code)
    for plot in result.plots:
        with open(f"plot.{plot.format.value}", "wb") as f:
            f.write(base64.b64decode(plot.content_base64))
    print(open("plot.svg").read(), repr(result.stdout))
# prints: <svg xmlns='http://www.w3.org/2000/svg'/> ''
