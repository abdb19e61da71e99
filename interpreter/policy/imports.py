import ast
import sys
import warnings

warnings.simplefilter("ignore")
cell = sys.argv[1:] == ["cell"]
text, _, plain = sys.stdin.buffer.read().rpartition(b"\0")
tree = None
for source in (text, plain) if cell else (text,):
    try:
        # Bytes, because a line may name another encoding; a cell is text, in which it does not count.
        tree = ast.parse(source.decode("utf-8", "replace") if cell else source)
        break
    except (SyntaxError, ValueError, LookupError, RecursionError, MemoryError):
        pass  # the run itself says so
found = {}


def add(name, node):
    if isinstance(name, str) and name.isprintable() and " " not in name and 0 < len(name.encode("utf-8", "replace")) <= 200:
        if len(found) < 1000:  # the daemon takes 256 KiB
            found.setdefault(name, node.lineno)


for node in ast.walk(tree) if tree is not None else ():
    if isinstance(node, ast.Import):
        for alias in node.names:
            add(alias.name, node)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        add(node.module, node)
        for alias in node.names:
            add(node.module + "." + alias.name, node)
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if called in ("__import__", "import_module"):
            add(node.args[0].value, node)
for name, line in found.items():
    sys.stdout.buffer.write(b"%d %s\n" % (line, name.encode("utf-8", "replace")))
sys.stdout.buffer.write(b"end\n")
