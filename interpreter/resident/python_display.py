# Forms of values: methods of IPython's protocol, tables, images and figures.
import base64
import io
import sys

FORMS = {
    "text/plain": "text", "text/html": "html", "text/markdown": "markdown", "image/svg+xml": "svg", "image/png": "png",
    "image/jpeg": "jpeg", "application/pdf": "pdf", "text/latex": "latex", "application/json": "json",
    "application/javascript": "javascript", "e2b/data": "data", "e2b/chart": "chart",
}
METHODS = (
    ("html", "_repr_html_"), ("markdown", "_repr_markdown_"), ("svg", "_repr_svg_"), ("png", "_repr_png_"),
    ("jpeg", "_repr_jpeg_"), ("pdf", "_repr_pdf_"), ("latex", "_repr_latex_"), ("json", "_repr_json_"),
    ("javascript", "_repr_javascript_"),
)
BINARY = ("png", "jpeg", "pdf")


def encoded(form, value):
    """Returns one form as JSON has it; None if it is not of the form's type."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        value = value[0]  # with metadata
    if form in BINARY:
        if isinstance(value, (bytes, bytearray, memoryview)):
            return base64.b64encode(value).decode()
        if isinstance(value, str):
            try:
                return base64.b64encode(base64.b64decode("".join(value.split()), validate=True)).decode()
            except ValueError:
                return None
        return None
    if form in ("json", "data", "chart"):
        return value
    return value if isinstance(value, str) else None


def from_media(media):
    """Returns a bundle of a dict of media types."""
    bundle = {}
    for kind, value in media.items():
        form = FORMS.get(kind)
        if form is None:
            if isinstance(value, (bytes, bytearray)):
                value = base64.b64encode(value).decode()
            bundle.setdefault("extra", {})[str(kind)] = value
            continue
        value = encoded(form, value)
        if value is not None:
            bundle[form] = value
    if isinstance(bundle.get("text"), str):
        bundle["text"] = unquoted(bundle["text"])
    return bundle


def unquoted(text):
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text


def ask(value, name):
    """Returns what a display method of a value returns; None if it has none or that fails."""
    if isinstance(value, type):
        return None  # a class has the methods of its objects
    try:
        method = getattr(value, name, None)
        if not callable(method) or callable(getattr(value, "_sandboxd_no_such_method_", None)):
            return None  # an object that has every name
        return method()
    except Exception:
        return None


def bundle(value):
    media = ask(value, "_repr_mimebundle_")
    if isinstance(media, tuple) and media:
        media = media[0]
    out = from_media(media) if isinstance(media, dict) else {}
    shell = kernel.shell  # noqa: F821, set by the kernel
    # IPython has an object display itself if it can, beside the result.
    itself = callable(getattr(type(value), "_ipython_display_", None)) and (out or hasattr(type(value), "_repr_html_"))
    if shell is not None and not itself:
        formatted, _ = shell.display_formatter.format(value)
        for form, v in from_media(formatted).items():
            out.setdefault(form, v)
    for form, name in METHODS:
        if form not in out:
            v = ask(value, name)
            v = None if v is None else encoded(form, v)
            if v is not None:
                out[form] = v
    special(value, out)
    if "text" not in out:
        text = repr(value)
        out["text"] = unquoted(text) if isinstance(value, str) else text
    return out


def special(value, out):
    """Adds forms of types that have no method for them."""
    pandas = sys.modules.get("pandas")
    if pandas is not None and "data" not in out and isinstance(value, getattr(pandas, "DataFrame", ())):
        data = table(pandas, value)
        if data is not None:
            out["data"] = data
    figures = sys.modules.get("matplotlib.figure")
    if figures is not None and isinstance(value, figures.Figure):
        out.update(figure(value))
        plt = sys.modules.get("matplotlib.pyplot")
        if plt is not None and value.number in plt.get_fignums() if hasattr(value, "number") else False:
            plt.close(value)  # or it would be shown again at the run's end


def table(pandas, frame):
    """Returns the columns of a table, as lists of values that JSON has."""
    try:
        return {str(name): [plain(pandas, v) for v in frame.iloc[:, i].tolist()] for i, name in enumerate(frame.columns)}
    except Exception:
        return None


def plain(pandas, v):
    if v is None or isinstance(v, (str, bool, int)):
        return v
    if isinstance(v, float):
        return v if v == v and v not in (float("inf"), float("-inf")) else None
    if v is pandas.NaT or v is getattr(pandas, "NA", None):
        return None
    if hasattr(v, "isoformat"):
        return v.isoformat()
    return str(v)


def figure(fig):
    buf = io.BytesIO()
    fig.savefig(buf, format="png", bbox_inches="tight")
    out = {"text": repr(fig), "png": base64.b64encode(buf.getvalue()).decode()}
    try:
        chart = kernel.part("charts").chart(fig)  # noqa: F821
    except Exception:
        chart = None
    if chart is not None:
        out["chart"] = chart
    return out


def figures(*_, **__):
    """Shows every open figure and closes it."""
    plt = sys.modules.get("matplotlib.pyplot")
    if plt is None or not hasattr(plt, "get_fignums"):
        return  # its import is under way or has failed
    for number in plt.get_fignums():
        fig = plt.figure(number)
        try:
            if fig.get_axes() or fig.texts or fig.images:
                kernel.publish(figure(fig))  # noqa: F821
        finally:
            plt.close(fig)


def inline(module):
    """Makes a module the matplotlib backend that shows figures as results."""
    from matplotlib.backends import backend_agg
    module.FigureCanvas = backend_agg.FigureCanvasAgg
    module.FigureManager = backend_agg.FigureManagerBase if hasattr(backend_agg, "FigureManagerBase") else None
    if module.FigureManager is None:
        from matplotlib.backend_bases import FigureManagerBase
        module.FigureManager = FigureManagerBase
    backend = backend_agg._BackendAgg
    for name in ("new_figure_manager", "new_figure_manager_given_figure", "draw_if_interactive"):
        f = getattr(backend, name, None)
        if f is not None:
            setattr(module, name, f)
    module.show = figures
