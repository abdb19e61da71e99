# IPython's syntax: its own where the image has IPython, and a few lines of ours where not.
import os
import re
import shlex
import subprocess
import sys

ours = None  # None until it is known whether there is IPython


def available():
    global ours
    if ours is None:
        import importlib.util
        ours = importlib.util.find_spec("IPython") is None
    return not ours


def start():
    """Makes IPython's shell one of the kernel: display and magics work as there."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config
    config = Config()
    config.InteractiveShell.colors = "NoColor"
    config.HistoryManager.enabled = False  # no file of the user's home
    shell = InteractiveShell.instance(config=config, user_module=kernel.main, user_ns=kernel.ns)  # noqa: F821
    display = kernel.part("display")  # noqa: F821

    def publish(data, metadata=None, source=None, **_):
        kernel.publish(display.from_media(data))  # noqa: F821

    shell.display_pub.publish = publish
    shell.enable_matplotlib = lambda gui=None: (gui, "module://sandboxd_inline")
    shell.ask_exit = lambda: None
    shell.system = shell.system_raw
    sys.modules["__main__"] = kernel.main  # noqa: F821
    sys.displayhook = kernel.displayhook  # noqa: F821
    kernel.shell = shell  # noqa: F821


def transform(code):
    """Returns a cell as Python."""
    if available():
        shell = kernel.ipython()  # noqa: F821
        return shell.transform_cell(code)
    if code.startswith("%%"):
        first, _, body = code.partition("\n")
        name, _, rest = first[2:].strip().partition(" ")
        if name in ("bash", "sh"):
            sys.modules["sandboxd_magic"] = kernel.parts["magic"]  # noqa: F821
            return "__import__('sys').modules['sandboxd_magic'].shell(%r, %r)\n" % (body, name)
        raise usage("%%" + name)
    lines = code.split("\n")
    if all(not line.strip() or line[:1] in " \t" for line in lines):  # as copied from a block
        import textwrap
        code = textwrap.dedent(code)
        lines = code.split("\n")
    for i, line in enumerate(lines):
        m = re.match(r"(\s*)(?:([\w., ]+?)\s*=\s*)?([!%])(.*)$", line)
        if m and not inside(lines[:i]):
            indent, name, what, rest = m.groups()
            call = "__import__('sys').modules['sandboxd_magic'].%s" % (
                "capture(%r)" % rest if what == "!" and name else "shell(%r)" % rest if what == "!" else "magic(%r)" % rest)
            lines[i] = indent + (name + " = " if name else "") + call
            continue
        m = re.match(r"\s*\??\s*([\w.]+)\s*\?{1,2}\s*$", line) or re.match(r"\s*\?{1,2}\s*([\w.]+)\s*$", line)
        if m and not inside(lines[:i]):
            lines[i] = "help(%s)" % m.group(1)
    sys.modules["sandboxd_magic"] = kernel.parts["magic"]  # noqa: F821
    return "\n".join(lines)


def inside(lines):
    """Reports whether a line behind these is in the middle of a statement or string."""
    source = "\n".join(l if l[:1] not in "!%" else "pass" for l in lines)
    if not source.strip():
        return False
    import io
    import tokenize
    try:
        for _ in tokenize.generate_tokens(io.StringIO(source + "\n").readline):
            pass
    except tokenize.TokenError:
        return True
    except (SyntaxError, IndentationError):
        pass
    return False


def usage(what):
    class UsageError(Exception):
        pass
    return UsageError("%s needs IPython, which this image lacks" % what)


def shell(command, program="sh"):
    kernel.flush()  # noqa: F821
    if "{" in command or "$" in command:
        command = expand(command)
    code = subprocess.call([program, "-c", command])
    kernel.ns["_exit_code"] = code  # noqa: F821


def expand(command):
    def value(m):
        try:
            return str(eval(m.group(1), kernel.ns))  # noqa: F821
        except Exception:
            return m.group(0)
    return re.sub(r"\{([^{}]+)\}", value, command)


def capture(command):
    out = subprocess.run(["sh", "-c", expand(command)], stdout=subprocess.PIPE).stdout
    return out.decode("utf-8", "replace").splitlines()


def magic(line):
    name, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    if name == "cd":
        os.chdir(os.path.expanduser(rest or "~"))
        print(os.getcwd())
    elif name == "pwd":
        return os.getcwd()
    elif name == "env":
        if "=" in rest:
            key, _, value = rest.partition("=")
            os.environ[key.strip()] = value.strip()
            return None
        return os.environ.get(rest) if rest else dict(os.environ)
    elif name == "pip":
        subprocess.call([sys.executable, "-m", "pip"] + shlex.split(rest))
    elif name in ("matplotlib", "config", "autoreload", "load_ext"):
        return None
    elif name in ("ls", "cat", "mkdir", "rm", "cp", "mv"):
        subprocess.call([name] + shlex.split(rest))
    elif name in ("time", "timeit"):
        import time
        begun = time.perf_counter()
        exec(rest, kernel.ns)  # noqa: F821
        print("Wall time: %.3g ms" % (1000 * (time.perf_counter() - begun)))
    else:
        raise usage("%" + name)
    return None
