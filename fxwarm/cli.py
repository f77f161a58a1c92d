"""The command line: see what a model asks of JIT kernel libraries, plan it, warm it, and check that it is warm.

Exit statuses: 0 done and complete; 1 done, but something is a gap, missing or failed; 2 the command could not run.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fxwarm import exc

DONE, INCOMPLETE, FAILED = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` and return its exit status."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, format="%(message)s")
    try:
        status: int = args.run(args)
    except (exc.FxwarmError, ValueError, OSError) as error:
        print(f"fxwarm: {error}", file=sys.stderr)
        return FAILED
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fxwarm",
        description=__doc__.splitlines()[0],
        epilog=__doc__.split("\n\n")[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what is done")
    parser.set_defaults(run=lambda args: _version() if args.version else parser.print_help() or DONE)
    commands = parser.add_subparsers(title="commands")

    def command(name: str, run: Any, about: str, example: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=about, description=about, epilog=f"example: {example}")
        sub.add_argument("--json", action="store_true", help="print JSON instead of tables")
        sub.set_defaults(run=run)
        return sub

    sub = command("demo", _demo, "trace two big models without weights, then run a small one cold and warm", "fxwarm demo")
    sub.add_argument("--models", nargs="*", default=["qwen3-30b-a3b", "deepseek-v3"], help="models to trace")
    sub.add_argument("--max-size", type=int, default=8192, help="largest number of tokens")
    sub.add_argument("--layers", type=int, default=None, help="layers of each model, all by default")
    sub.add_argument("--calls", type=int, default=50, help="token counts of the small model; 0 skips it")

    sub = command("trace", _trace, "write the shape set of a model", "fxwarm trace mymodel:build -o shapes.json")
    sub.add_argument("model", help="module:function that returns (model, args) or (model, args, kwargs)")
    sub.add_argument("--max-size", type=int, default=8192, help="largest batch*seq")
    sub.add_argument("-o", "--output", type=Path, help="file to write")

    sub = command(
        "plan", _plan, "plan the kernels of a shape set for a target", "fxwarm plan shapes.json --target h200 -o plan.json"
    )
    sub.add_argument("shapes", type=Path, help="a shape-set file")
    sub.add_argument("--target", help="cpu, h100, h200, h20, b200, …; this machine by default")
    sub.add_argument("--library", action="append", default=[], metavar="NAME==VERSION", help="a build to plan for")
    sub.add_argument("-o", "--output", type=Path, help="file to write")

    sub = command("show", _show, "show a shape set, a plan or a report", "fxwarm show plan.json")
    sub.add_argument("file", type=Path)

    sub = command("diff", _diff, "show what a release changed", "fxwarm diff old.json new.json")
    sub.add_argument("old", type=Path)
    sub.add_argument("new", type=Path)

    sub = command("warm", _warm, "build and load every kernel of a plan on this machine", "fxwarm warm plan.json --jobs 16")
    sub.add_argument("plan", type=Path)
    sub.add_argument("--jobs", type=int, default=0, help="compiles at the same time, the CPUs by default")

    sub = command("verify", _verify, "say whether a plan is warm on this machine's disk", "fxwarm verify plan.json")
    sub.add_argument("plan", type=Path)

    command("doctor", _doctor, "say what is installed, what would not work, and what to do", "fxwarm doctor")
    return parser


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
    best = next((r for r in reasons if "schema" in r or "damaged" in r or "truncated" in r), reasons[0])
    raise ValueError(f"{path}: {best}")


def _print(thing: Any, as_json: bool) -> None:
    if as_json:
        print(thing.to_json())
    else:
        from rich.console import Console

        Console().print(thing)


def _write(path: Path | None, thing: Any) -> None:
    from fxwarm import store

    if path is not None and not store.write(path.absolute(), thing.to_json()):
        raise OSError(f"could not write {path}")


def _version() -> int:
    from fxwarm import __version__

    print(f"fxwarm {__version__}")
    return DONE


def _demo(args: argparse.Namespace) -> int:
    from fxwarm import demo

    return demo.run(args.models, tokens=args.max_size, calls=args.calls, json=args.json, layers=args.layers)


def _trace(args: argparse.Namespace) -> int:
    from fxwarm.tracing import trace

    sys.path.insert(0, "")
    module, _, function = args.model.partition(":")
    built = getattr(importlib.import_module(module), function or "build")()
    model, model_args, *rest = built
    shapes = trace(model, *model_args, max_size=args.max_size, **(rest[0] if rest else {}))
    _write(args.output, shapes)
    _print(shapes, args.json)
    return DONE if shapes.is_complete else INCOMPLETE


def _plan(args: argparse.Namespace) -> int:
    from fxwarm.api import plan
    from fxwarm.records import Target
    from passes.records import ShapeSet

    libraries = dict(text.split("==", 1) for text in args.library if "==" in text)
    if len(libraries) != len(args.library):
        raise ValueError(f"--library takes NAME==VERSION, not {args.library}")
    shapes = ShapeSet.from_json(args.shapes.read_bytes())
    made = plan(shapes, Target.named(args.target) if args.target else None, libraries)
    _write(args.output, made)
    _print(made, args.json)
    return DONE if made.is_complete else INCOMPLETE


def _show(args: argparse.Namespace) -> int:
    _print(read_any(args.file), args.json)
    return DONE


def _diff(args: argparse.Namespace) -> int:
    old, new = read_any(args.old), read_any(args.new)
    if type(old) is not type(new) or not hasattr(old, "__sub__"):
        raise ValueError(f"{args.old} and {args.new} are not both shape sets")
    added, removed = new - old, old - new
    if args.json:
        print(f'{{"added":{added.to_json()},"removed":{removed.to_json()}}}')
    else:
        from rich.console import Console

        console = Console()
        for title, part in (("added", added), ("removed", removed)):
            console.print(f"[bold]{title}[/bold]")
            console.print(part)
    return DONE if not (added.calls or removed.calls) else INCOMPLETE


def _warm(args: argparse.Namespace) -> int:
    from fxwarm.api import warm
    from fxwarm.records import WarmPlan

    report = warm(WarmPlan.from_json(args.plan.read_bytes()), jobs=args.jobs)
    _print(report, args.json)
    return DONE if report.status == "complete" else INCOMPLETE


def _verify(args: argparse.Namespace) -> int:
    from fxwarm.doctor import missing
    from fxwarm.records import WarmPlan

    plan = WarmPlan.from_json(args.plan.read_bytes())
    lacking = missing(plan)
    if args.json:
        import msgspec

        print(msgspec.json.encode({"planned": len(plan), "missing": lacking}).decode())
    else:
        print(f"{len(plan) - len(lacking)} of {len(plan)} kernels are on this machine's disk")
        for key in lacking:
            print(f"missing: {key}")
    return DONE if not lacking else INCOMPLETE


def _doctor(args: argparse.Namespace) -> int:
    from fxwarm.doctor import examine

    found = examine()
    if args.json:
        import msgspec

        print(msgspec.json.encode(found).decode())
    else:
        from rich.console import Console

        for line in found.lines():
            Console().print(line, highlight=False)
    return DONE if not found.problems else INCOMPLETE
