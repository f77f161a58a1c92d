"""The command line: see what a model asks of JIT kernel libraries, plan it, warm it, and check that it is warm.

exit statuses:
  0  done and complete
  1  done, but something is a gap, missing, different or failed
  2  the command could not run
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fxwarm import exc
from fxwarm.commands import DONE, FAILED, INCOMPLETE

START = """\
examples:
  fxwarm trace Qwen3-30B-A3B-FP8/ -o shapes.json     what will this model JIT?
  fxwarm plan shapes.json --target h200 -o plan.json  which kernels is that?
  fxwarm warm plan.json                               build and load them here
  fxwarm verify plan.json                             is this machine warm?
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` and return its exit status."""
    args = _parser().parse_args(argv)
    level = logging.INFO if args.verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s")
    try:
        module, _, function = args.run.partition(":")
        status: int = getattr(importlib.import_module(f"fxwarm.commands.{module}"), function)(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except (exc.FxwarmError, ValueError, OSError) as error:
        print(f"fxwarm: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("fxwarm: interrupted; run the command again, what is built is kept", file=sys.stderr)
        return FAILED
    return status


def _parser() -> argparse.ArgumentParser:
    from fxwarm import __version__

    about, statuses = (__doc__ or "\n\n").strip().split("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="fxwarm", description=about, epilog=f"{START}\n{statuses}", formatter_class=raw
    )
    parser.add_argument("--version", action="version", version=f"fxwarm {__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what is done")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: str, does: str, *examples: str) -> argparse.ArgumentParser:
        shown = "\n".join(("examples:", *(f"  fxwarm {name} {e}".rstrip() for e in examples)))
        sub = commands.add_parser(
            name, help=does, description=does, epilog=f"{shown}\n\n{statuses}", formatter_class=raw
        )
        sub.add_argument("--json", action="store_true", help="print one JSON value, no tables")
        sub.set_defaults(run=run)
        return sub

    def output(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "-o", "--output", type=Path, metavar="FILE", help="also write it to a file"
        )

    sub = command(
        "trace", "shapes:trace", "Write the shape set of a model: every JIT kernel call, for any batch.",
        "Qwen3-30B-A3B-FP8/ -o shapes.json", "llama/config.json --fp8 --layers 2", "mymodel:build --max-size 4096",
    )  # fmt: skip
    sub.add_argument(
        "model",
        help="a folder with a Hugging Face config.json (of an fp8 checkpoint; nothing is downloaded), or "
        "module:function that returns (model, args) or (model, args, kwargs)",
    )
    sub.add_argument(
        "--max-size", type=int, default=8192, metavar="N", help="most tokens of a step (8192)"
    )
    sub.add_argument(
        "--layers", type=int, metavar="N", help="only the first layers of a configuration"
    )
    sub.add_argument(
        "--fp8", action="store_true", help="plan for an fp8 checkpoint of a bf16 configuration"
    )
    output(sub)

    sub = command(
        "plan", "warming:plan", "Plan the kernels that a shape set can need on a target.",
        "shapes.json --target h200 -o plan.json", "shapes.json --target h20 --library sgl-deep-gemm==0.1.2",
    )  # fmt: skip
    sub.add_argument("shapes", type=Path, help="a shape-set file")
    sub.add_argument("--target", help="cpu, h100, h200, h20, b200, …; this machine by default")
    sub.add_argument(
        "--library",
        action="append",
        default=[],
        metavar="NAME==VERSION",
        help="a build to plan for",
    )
    output(sub)

    sub = command(
        "show",
        "shapes:show_file",
        "Show a shape set, a plan or a report.",
        "plan.json",
        "plan.json --svg plan.svg",
    )
    sub.add_argument("file", type=Path)
    sub.add_argument(
        "--svg", type=Path, metavar="FILE", help="draw it too (needs fxwarm[notebooks])"
    )

    sub = command(
        "diff", "shapes:diff", "Show what changed between two shape sets or two plans; status 1 if anything did.",
        "old.json new.json",
    )  # fmt: skip
    sub.add_argument("old", type=Path)
    sub.add_argument("new", type=Path)

    sub = command(
        "warm",
        "warming:warm",
        "Build, tune and load every kernel of a plan on this machine.",
        "plan.json --jobs 16",
    )
    sub.add_argument("plan", type=Path)
    sub.add_argument(
        "--jobs",
        type=int,
        default=0,
        metavar="N",
        help="compiles at the same time, the CPUs by default",
    )
    output(sub)

    sub = command(
        "verify", "warming:verify", "Say whether a plan is warm on this machine's disk; status 1 if it is not.",
        "plan.json && serve",
    )  # fmt: skip
    sub.add_argument("plan", type=Path)

    command(
        "doctor",
        "machine:doctor",
        "Say what is installed, what would not work, and what to do.",
        "",
        "--json",
    )

    sub = command(
        "clean", "machine:clean", "Show what lies in the caches and which stored plans use it; remove only with --yes.",
        "", "--root deep_gemm", "--root deep_gemm --root tilelang --yes",
    )  # fmt: skip
    sub.add_argument(
        "--root", action="append", choices=("deep_gemm", "flashinfer", "tilelang", "torch", "fxwarm"), help="a cache to list or clean"
    )  # fmt: skip
    sub.add_argument(
        "--yes", action="store_true", help="remove what no stored plan uses from the named roots"
    )

    sub = command(
        "demo", "machine:demo", "Trace two big models without weights, plan FlashInfer's calls, run a small one cold and warm.",
        "", "--calls 0 --layers 2",
    )  # fmt: skip
    sub.add_argument(
        "--models", nargs="*", default=["qwen3-30b-a3b", "deepseek-v3"], help="models to trace"
    )
    sub.add_argument(
        "--max-size", type=int, default=8192, metavar="N", help="most tokens of a step (8192)"
    )
    sub.add_argument("--layers", type=int, metavar="N", help="layers of each model, all by default")
    sub.add_argument(
        "--calls",
        type=int,
        default=50,
        metavar="N",
        help="token counts of the small model; 0 skips it",
    )
    return parser


__all__ = ["DONE", "FAILED", "INCOMPLETE", "main"]
