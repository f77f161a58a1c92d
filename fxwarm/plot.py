"""Pictures of our records: a ShapeSet's ranges, a plan's kernels over M, a report's builds, measured latencies.

Each is SVG with a transparent background and mid-contrast colours, right on light and dark pages alike. Drawn by
matplotlib, which the extra ``fxwarm[notebooks]`` brings.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxwarm import exc
from fxwarm.lanes import Label, Lane, label_of, lanes_of, rows_of, weight_of
from fxwarm.records import Built, Loaded, Tuned, WarmPlan, WarmReport
from passes.records import ShapeSet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#7d8590"
"""Text and axes: 3.8:1 against white, 4.9:1 against GitHub's dark page."""
COLD, WARM, OTHER = "#e0703a", "#2f9e8f", "#8a7fd1"
ON_COLOUR = "#101418"
"""Text on a coloured band, which is opaque."""
ROW = 0.52
"""Inches of one lane."""
STALL = 100
"""Milliseconds from which on a call counts as a stall, as in ``tests/gpu/serve.py``."""


class Drawing:
    """SVG text that a notebook shows as a picture."""

    def __init__(self, svg: str) -> None:
        self.svg = svg

    def _repr_svg_(self) -> str:
        return self.svg

    def __str__(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"<Drawing: {len(self.svg):,} characters of SVG>"

    def save(self, path: str | Path) -> None:
        """Write the SVG to a file."""
        Path(path).write_text(self.svg, encoding="utf-8")


def draw(x: ShapeSet | WarmPlan | WarmReport, label: Label | None = None) -> Drawing:
    """Return a picture of ``x``: the ranges of a shape set, a plan's kernels over M, what a report's time went to.

    ``label`` names a kernel on its band; the default asks the family (``label(key)``), else takes the arguments at
    which a call's kernels differ. Raises OptionError for anything else, LibraryError without matplotlib.
    """
    if isinstance(x, WarmPlan):
        return bands(
            lanes_of(x),
            label=label,
            title=f"{len(x)} kernels on {x.target.name}, {x.target.num_sms} SMs",
        )
    if isinstance(x, ShapeSet):
        return _draw_shapes(x)
    if isinstance(x, WarmReport):
        return _draw_report(x)
    raise exc.OptionError(
        f"a {type(x).__name__} has no picture; give a ShapeSet, a WarmPlan or a WarmReport"
    )


def bands(
    rows: Sequence[Lane], label: Label | None = None, title: str = "", axis: str = "M, rows"
) -> Drawing:
    """Return lanes of bands over a log axis: one colour a kernel, the same in every lane."""
    figure, axes = _figure(1.1 + ROW * len(rows), title)
    keys = list(dict.fromkeys(band.key for _, found in rows for band in found))
    colours = dict(zip(keys, _colours(len(keys)), strict=True))
    largest = max((band.last for _, found in rows for band in found), default=1)
    smallest = min((band.first for _, found in rows for band in found), default=1)
    for index, (_, found) in enumerate(rows):
        name = label or label_of([band.key for band in found])
        for band in found:
            first, last = band.first - 0.5, band.last + 0.5
            axes.barh(
                index,
                last - first,
                left=first,
                height=0.72,
                color=colours[band.key],
                edgecolor="none",
            )
            _write_on(axes, name(band.key), index, (first, last), (smallest, largest))
    axes.set_xscale("log", base=2)
    axes.set_xlim(max(0.5, smallest - 0.5), largest + 0.5)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(axis)
    _numbers(axes)
    return _svg(figure)


def latency(result: Mapping[str, Any]) -> Drawing:
    """Return first-call latency over token counts, with and without fxwarm: a file of ``tests/gpu/serve.py``.

    A point is the first call with that many tokens in a process that has already made one call.
    """
    cold, warm = result["runs"]["inductor"], result["runs"]["fxwarm cold"]
    figure, axes = _figure(4.4, "", width=9.2)
    for run, colour in ((cold, COLD), (warm, WARM)):
        for stall, dot in ((False, 4.2), (True, 7.0)):
            points = [(p[0], p[1]) for p in run["points"] if (p[1] > STALL) == stall]
            tokens, first = [p[0] for p in points], [p[1] for p in points]
            axes.plot(tokens, first, "o", color=colour, markersize=dot, markeredgewidth=0, zorder=3)
            if stall:
                axes.vlines(tokens, run["p50_ms"], first, color=colour, lw=0.9, alpha=0.4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(0.12, 45_000)
    axes.set_ylabel("first call with that many tokens")
    axes.set_yticks([1, 10, 100, 1000, 10_000], ["1 ms", "10 ms", "100 ms", "1 s", "10 s"])
    axes.grid(axis="y", color=INK, alpha=0.25, linewidth=0.6)
    counts = [p[0] for p in cold["points"]]
    axes.set_xlim(min(counts) / 1.25, max(counts) * 1.25)
    axes.set_xticks([2**i for i in range(0, 14, 2)])
    axes.minorticks_off()
    _numbers(axes)
    for run, colour, y, name in (
        (cold, COLD, 22_000, "without fxwarm"),
        (warm, WARM, 0.24, "with fxwarm"),
    ):
        stalls, worst = run["stalls_over_100_ms"], run["max_ms"]
        what = f"{stalls} of {run['calls']} calls stall" if stalls else "no stall"
        slowest = f"{worst / 1e3:.1f} s" if worst > 1e3 else f"{worst:.1f} ms"
        late = f"{run['jit_after']} kernels" if run["jit_after"] else "nothing"
        text = f"{name}: {what}, slowest call {slowest}; {late} compiled while serving"
        axes.text(
            min(counts), y, text, color=colour, va="center", weight="bold", size=10.5
        ).set_in_layout(False)
    versions = result["versions"]
    about = f"{result['model']}, {result['card']}, torch {versions['torch']}, {versions['library']}, {result['date']}"
    before = f"Not shown: the very first call, {cold['first_call_s']:.0f} s without and {warm['first_call_s']:.0f} s with."
    axes.set_xlabel(f"tokens in the step\n{about}\n{before}", linespacing=1.8, size=8.5)
    return _svg(figure)


def _draw_shapes(shapes: ShapeSet) -> Drawing:
    from passes.text import range_text

    calls = [(call, dim) for call in shapes.calls if (dim := rows_of(call)) is not None]
    figure, axes = _figure(1.1 + ROW * len(calls), f"{len(shapes)} kernel calls, rows of each")
    distinct = list(dict.fromkeys(call.op for call, _ in calls))
    ops = dict(zip(distinct, (WARM, OTHER, COLD, *_colours(len(distinct))), strict=False))
    names = []
    for index, (call, dim) in enumerate(calls):
        upper = dim.lower if dim.upper is None else dim.upper
        axes.barh(
            index,
            max(upper - dim.lower, dim.lower * 0.03),
            left=dim.lower,
            height=0.6,
            color=ops[call.op],
        )
        axes.text(upper * 1.15, index, range_text(dim), va="center", size=8, color=INK)
        names.append(f"{call.op}\n{weight_of(call)}")
    axes.set_xscale("log", base=2)
    axes.set_xlim(0.8, max((d.upper or d.lower for _, d in calls), default=1) * 16)
    axes.set_yticks(range(len(calls)), names)
    axes.set_ylim(len(calls) - 0.4, -0.6)
    axes.set_xlabel("rows")
    _numbers(axes)
    return _svg(figure)


def _draw_report(report: WarmReport) -> Drawing:
    steps: list[tuple[str, tuple[Built | Loaded | Tuned, ...], str]] = [
        ("built", report.built, COLD),
        ("tuned", report.tuned, OTHER),
        ("loaded", report.loaded, WARM),
    ]
    items = [
        (kind, x, colour)
        for kind, done, colour in steps
        for x in sorted(done, key=lambda x: -x.seconds)
    ]
    shown = items[:40]
    title = f"warmup {report.status} on {report.target.name} in {report.seconds:.1f} s"
    figure, axes = _figure(1.1 + 0.24 * max(1, len(shown)), title)
    name = label_of([x.key for _, x, _ in items])
    for index, (_, x, colour) in enumerate(shown):
        axes.barh(index, max(x.seconds, 1e-4), height=0.7, color=colour)
        axes.text(
            max(x.seconds, 1e-4),
            index,
            f" {_time(x.seconds)}{' failed' if x.error else ''}",
            va="center",
            size=8,
            color=INK,
        )
    labels = [
        " ".join(dict.fromkeys((kind, x.key.kernel, name(x.key)))) for kind, x, _ in shown
    ]  # a name of its own need not be said twice
    axes.set_yticks(range(len(shown)), labels, size=8)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, 1.2 * max((x.seconds for _, x, _ in shown), default=1.0) or 1.0)
    left = f"; {len(items) - len(shown)} more not shown" if len(items) > len(shown) else ""
    axes.set_xlabel(
        f"seconds of each step, builds run side by side ({report.build_seconds:.1f} s in all){left}"
    )
    return _svg(figure)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.1f} ms"


def _write_on(
    axes: Axes, text: str, y: float, span: tuple[float, float], whole: tuple[int, int]
) -> None:
    """Write ``text`` on a band where it fits, upright where only that fits."""
    import math

    share = math.log(span[1] / max(span[0], 0.5)) / max(
        math.log((whole[1] + 0.5) / max(0.5, whole[0] - 0.5)), 1e-9
    )
    points, centre = share * 480, math.sqrt(max(span[0], 0.5) * span[1])
    if len(text) * 4.3 < points:
        axes.text(centre, y, text, ha="center", va="center", size=7.5, color=ON_COLOUR)
    elif points > 8 and len(text) <= 7:
        axes.text(centre, y, text, ha="center", va="center", size=5.8, color=ON_COLOUR, rotation=90)


def _colours(count: int) -> list[str]:
    """Return ``count`` colours of middling lightness, neighbours far apart in hue; dark text reads on each."""
    import colorsys

    def one(index: int) -> str:
        hue, wanted = (0.47 + index * 0.381966) % 1.0, (0.34, 0.46, 0.27)[index % 3]
        low, high = 0.0, 1.0
        for _ in range(
            12
        ):  # the HLS lightness that has the wanted luminance: blue is darker than yellow
            middle = (low + high) / 2
            red, green, blue = colorsys.hls_to_rgb(hue, middle, 0.5)
            light = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
            low, high = (middle, high) if light < wanted else (low, middle)
        return "#" + "".join(f"{round(255 * c):02x}" for c in (red, green, blue))

    return [one(index) for index in range(count)]


def _figure(height: float, title: str, width: float = 10.0) -> tuple[Figure, Axes]:
    if importlib.util.find_spec("matplotlib") is None:
        raise exc.LibraryError("pictures are drawn by matplotlib; install fxwarm[notebooks]")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.set_facecolor("none")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(INK)
    axes.tick_params(colors=INK, which="both", labelsize=9)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    if title:
        axes.set_title(title, loc="left", color=INK, size=11, weight="bold")
    return figure, axes


def _numbers(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter

    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else "")
    )


def _svg(figure: Figure) -> Drawing:
    import matplotlib as mpl

    out = io.StringIO()
    # a fixed salt and no date: the same records give the same bytes
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": "fxwarm"}):
        figure.savefig(
            out, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    text = out.getvalue()
    return Drawing(text[text.index("<svg") :])


__all__ = ["Drawing", "bands", "draw", "latency"]
