import sys

# The module ast takes longer to import than all else here.
ONLY_AST = 0x400
cell = sys.argv[1:] == ["cell"]
text, _, plain = sys.stdin.buffer.read().rpartition(b"\0")
todo = []
for source in (text, plain) if cell else (text,):
    try:
        # Bytes, because a line may name another encoding; a cell is text, in which it does not count.
        todo = [compile(source.decode("utf-8", "replace") if cell else source, "code", "exec", ONLY_AST, True)]
        break
    except (SyntaxError, ValueError, LookupError, RecursionError, MemoryError):
        pass  # the run itself says so
found = {}


def add(name, node):
    if isinstance(name, str) and name.isprintable() and " " not in name and 0 < len(name.encode("utf-8", "replace")) <= 200:
        line = found.setdefault(name, node.lineno) if len(found) < 1000 or name in found else 0  # the daemon takes 256 KiB
        if node.lineno < line:
            found[name] = node.lineno


for node in todo:  # which grows
    kind = type(node).__name__
    if kind == "Import":
        for alias in node.names:
            add(alias.name, node)
    elif kind == "ImportFrom" and node.module and not node.level:
        add(node.module, node)
        for alias in node.names:
            add(node.module + "." + alias.name, node)
    elif kind == "Call" and node.args and type(node.args[0]).__name__ == "Constant":
        if getattr(node.func, "id", getattr(node.func, "attr", "")) in ("__import__", "import_module"):
            add(node.args[0].value, node)
    for field in node._fields:
        value = getattr(node, field, None)
        for child in value if isinstance(value, list) else (value,):
            if hasattr(child, "_fields"):
                todo.append(child)
for name, line in found.items():
    sys.stdout.buffer.write(b"%d %s\n" % (line, name.encode("utf-8", "replace")))
sys.stdout.buffer.write(b"end\n")
