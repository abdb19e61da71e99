"""Forms of a result."""
from e2b_code_interpreter import Sandbox

with Sandbox.create() as sandbox:
    execution = sandbox.run_code(
        "class Table:\n"
        "    def _repr_html_(self): return '<table></table>'\n"
        "    def __repr__(self): return 'a table'\n"
        "Table()"
    )
    result = execution.results[0]
    print(result.html, result.text, result.is_main_result, sorted(result.formats()))
    print(execution.to_json()[:13])
# prints: <table></table> a table True ['html', 'text']
# prints: {"results": [
