# Charts as data, in the shape that E2B's clients read: type, title, axes, elements.
CHART_TYPES = ("line", "scatter", "bar", "pie", "box_and_whisker")


def chart(figure):
    """Returns the chart of a figure, or of several axes a chart of charts; None if there is none."""
    charts = [c for c in (axes_chart(ax) for ax in figure.get_axes()) if c is not None]
    if not charts:
        return None
    if len(charts) == 1:
        return charts[0]
    title = getattr(figure, "_suptitle", None)
    return {"type": "superchart", "title": title.get_text() if title is not None else "", "elements": charts}


def axes_chart(ax):
    from matplotlib.collections import PathCollection
    from matplotlib.container import BarContainer
    from matplotlib.patches import Wedge

    wedges = [p for p in ax.patches if isinstance(p, Wedge)]
    if wedges:
        return {"type": "pie", "title": ax.get_title(), "elements": [
            {"label": plain_label(w.get_label()), "angle": value(w.theta2 - w.theta1), "radius": value(w.r)} for w in wedges]}
    boxes = box_elements(ax)
    bars = [c for c in ax.containers if isinstance(c, BarContainer)]
    points = [c for c in ax.collections if isinstance(c, PathCollection)]
    if boxes:
        out = {"type": "box_and_whisker", "elements": boxes}
    elif bars:
        out = {"type": "bar", "elements": bar_elements(ax, bars)}
    elif points:
        out = {"type": "scatter", "elements": [
            {"label": plain_label(c.get_label()), "points": [[value(x), value(y)] for x, y in c.get_offsets()]} for c in points]}
    elif ax.lines:
        out = {"type": "line", "elements": [
            {"label": plain_label(line.get_label()), "points": [[value(x), value(y)] for x, y in zip(line.get_xdata(), line.get_ydata())]}
            for line in ax.lines]}
    else:
        return None
    out["title"] = ax.get_title()
    for axis in ("x", "y"):
        label = getattr(ax, "get_%slabel" % axis)()
        out[axis + "_label"] = label or None
        out[axis + "_unit"] = unit(label)
    if out["type"] in ("line", "scatter"):
        for axis in ("x", "y"):
            out[axis + "_ticks"] = [value(v) for v in getattr(ax, "get_%sticks" % axis)()]
            out[axis + "_tick_labels"] = [t.get_text() for t in getattr(ax, "get_%sticklabels" % axis)()]
            out[axis + "_scale"] = getattr(ax, "get_%sscale" % axis)()
    return out


def plain_label(label):
    label = str(label)
    return "" if label.startswith("_") else label


def unit(label):
    """Returns the unit at the end of a label: in parentheses or brackets, or behind " in "."""
    import re
    m = re.search(r"[(\[]([^()\[\]]+)[)\]]\s*$", label or "") or re.search(r"\bin (\S+)\s*$", label or "")
    return m.group(1) if m else None


def value(v):
    """Returns a coordinate as JSON has it."""
    if hasattr(v, "isoformat"):
        return v.isoformat()
    if type(v).__name__ == "datetime64":
        return str(v)
    try:
        f = float(v)
    except (TypeError, ValueError):
        return str(v)
    if f != f or f in (float("inf"), float("-inf")):
        return None
    return int(f) if f == int(f) and abs(f) < 1 << 53 and not isinstance(v, float) else f


def bar_elements(ax, containers):
    out = []
    for c in containers:
        across = getattr(c, "orientation", None) == "horizontal"
        axis = ax.yaxis if across else ax.xaxis
        names = dict(zip((round(t, 6) for t in axis.get_ticklocs()), (t.get_text() for t in axis.get_ticklabels())))
        for bar in c.patches:
            at, size = (bar.get_y() + bar.get_height() / 2, bar.get_width()) if across else (bar.get_x() + bar.get_width() / 2, bar.get_height())
            out.append({"label": names.get(round(at, 6)) or str(value(at)), "value": value(size), "group": plain_label(c.get_label())})
    return out


def box_elements(ax):
    """Finds the lines that boxplot draws: for each box seven of one shape."""
    lines = list(ax.lines)
    boxes = [i for i, l in enumerate(lines) if len(l.get_xdata()) == 5 and l.get_xdata()[0] == l.get_xdata()[-1] and l.get_ydata()[0] == l.get_ydata()[-1]]
    names = dict(zip((round(t, 6) for t in ax.get_xticks()), (t.get_text() for t in ax.get_xticklabels())))
    out = []
    for i in boxes:
        if i + 5 >= len(lines):
            return []
        box, low, high, cap_low, cap_high, median = lines[i:i + 6]
        if len(median.get_ydata()) != 2 or len(low.get_ydata()) != 2:
            return []
        at = sum(box.get_xdata()[:2]) / 2
        fliers = lines[i + 6].get_ydata() if i + 6 < len(lines) and i + 6 not in boxes else []
        out.append({
            "label": names.get(round(at, 6)) or str(value(at)),
            "min": value(min(cap_low.get_ydata())), "first_quartile": value(min(box.get_ydata())), "median": value(median.get_ydata()[0]),
            "third_quartile": value(max(box.get_ydata())), "max": value(max(cap_high.get_ydata())), "outliers": [value(v) for v in fliers],
        })
    return out
