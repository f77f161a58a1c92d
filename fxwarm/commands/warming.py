"""plan, warm, verify: from a shape set to warm kernels on this machine."""

from __future__ import annotations

import argparse

from fxwarm.commands import DONE, INCOMPLETE
from fxwarm.commands.output import busy, encode, show, write


def plan(args: argparse.Namespace) -> int:
    """Plan the kernels of a shape set: 0 complete, 1 with gaps."""
    from fxwarm import api
    from fxwarm.records import Target
    from passes.records import ShapeSet

    libraries = dict(text.split("==", 1) for text in args.library if "==" in text)
    if len(libraries) != len(args.library):
        raise ValueError(f"--library takes NAME==VERSION, not {', '.join(args.library)}")
    shapes = ShapeSet.from_json(args.shapes.read_bytes())
    with busy(f"planning {len(shapes)} calls …"):
        made = api.plan(shapes, Target.named(args.target) if args.target else None, libraries)
    write(args.output, made)
    show(made, args.json)
    return DONE if made.is_complete else INCOMPLETE


def warm(args: argparse.Namespace) -> int:
    """Build, tune and load a plan: 0 complete, 1 where something failed or is a gap."""
    from fxwarm import api
    from fxwarm.records import WarmPlan

    report = api.warm(WarmPlan.from_json(args.plan.read_bytes()), jobs=args.jobs)
    write(args.output, report)
    show(report, args.json)
    return DONE if report.status == "complete" else INCOMPLETE


def verify(args: argparse.Namespace) -> int:
    """Say whether a plan is warm on this machine's disk: 0 it is, 1 something is missing, changed or another build."""
    from fxwarm import receipts
    from fxwarm.doctor import missing, other_builds
    from fxwarm.options import resolve
    from fxwarm.records import WarmPlan

    made = WarmPlan.from_json(args.plan.read_bytes())
    with busy(f"looking for {len(made)} kernels …"):
        lacking, others = missing(made), other_builds(made)
        changed = receipts.changed(made, resolve())
    is_warm = not (lacking or changed or others) and made.is_complete
    if args.json:
        found = {
            "warm": is_warm,
            "planned": len(made),
            "missing": lacking,
            "changed": changed,
            "libraries": others,
            "gaps": made.gaps,
        }
        print(encode(found))
    else:
        print(f"{len(made) - len(lacking)} of {len(made)} kernels are on this machine's disk")
        for key in lacking:
            print(f"missing: {key}")
        for text in changed:
            print(f"changed since its receipt: {text}; remove it and run fxwarm warm")
        for text in (*others, *(f"gap: {gap}" for gap in made.gaps)):
            print(text)
        print("warm" if is_warm else "not warm; run fxwarm warm on this machine")
    return DONE if is_warm else INCOMPLETE
