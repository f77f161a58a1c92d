"""trace, show, diff: shape sets, and any file of ours."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fxwarm.commands import DONE, INCOMPLETE
from fxwarm.commands.output import busy, encode, show, write


def trace(args: argparse.Namespace) -> int:
    """Write the shape set of a model: 0 complete, 1 with gaps."""
    from fxwarm import tracing
    from fxwarm.commands.model import load

    with busy(f"building {args.model} …"):
        model, inputs, more = load(args.model, layers=args.layers, fp8=args.fp8)
    with busy(f"tracing {args.model} …"):
        shapes = tracing.trace(model, *inputs, max_size=args.max_size, **more)
    write(args.output, shapes)
    show(shapes, args.json)
    return DONE if shapes.is_complete else INCOMPLETE


def show_file(args: argparse.Namespace) -> int:
    """Show a shape set, a plan or a report; draw it with ``--svg``."""
    record = read_any(args.file)
    if args.svg is not None:
        from fxwarm.plot import draw

        draw(record).save(args.svg)
    show(record, args.json)
    return DONE


def diff(args: argparse.Namespace) -> int:
    """Show what was added and removed between two shape sets or two plans: 0 the same, 1 not."""
    old, new = read_any(args.old), read_any(args.new)
    if type(old) is not type(new):
        raise ValueError(
            f"{args.old} is a {type(old).__name__}, {args.new} a {type(new).__name__}; give two files of one kind"
        )
    parts = {"added": _minus(new, old), "removed": _minus(old, new)}
    if args.json:
        print(encode(parts))
    else:
        for title, part in parts.items():
            print(f"{title}:")
            show(part or "nothing", as_json=False)
    return INCOMPLETE if any(parts.values()) else DONE


def read_any(path: Path) -> Any:
    """Return the record in ``path``: a ShapeSet, a WarmPlan or a WarmReport.

    Raises ValueError that says what the file is instead.
    """
    from fxwarm.records import WarmPlan, WarmReport
    from passes.records import ShapeSet

    text = path.read_bytes()
    reasons = []
    for cls in (ShapeSet, WarmPlan, WarmReport):
        try:
            return cls.from_json(text)
        except ValueError as error:
            reasons.append(str(error))
    # The class that got furthest knows best: the others only say that the file is not theirs.
    best = next(
        (r for r in reasons if "schema" in r or "damaged" in r or "truncated" in r), reasons[0]
    )
    raise ValueError(f"{path}: {best}")


def _minus(one: Any, other: Any) -> Any:
    """Return what ``one`` has and ``other`` lacks, as a record of the same kind."""
    import msgspec

    from fxwarm.records import WarmPlan
    from passes.records import ShapeSet

    if isinstance(one, ShapeSet):
        return one - other
    if isinstance(one, WarmPlan):
        known = set(other.planned)
        left = tuple(p for p in one.planned if p not in known)
        gaps = tuple(gap for gap in one.gaps if gap not in other.gaps)
        empty = {"reference": (), "notes": (), "shapes": ShapeSet()}
        made = msgspec.structs.replace(one, planned=left, gaps=gaps, **empty)
        return made if left or gaps else ()
    raise ValueError("reports are not compared; give two shape sets or two plans")
