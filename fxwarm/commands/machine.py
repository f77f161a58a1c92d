"""doctor, clean, demo: this machine, its libraries and its caches."""

from __future__ import annotations

import argparse

from fxwarm.commands import DONE, INCOMPLETE
from fxwarm.commands.output import busy, console, encode, show
from passes.table import plural, size


def doctor(args: argparse.Namespace) -> int:
    """Say what is installed and what would not work: 0 no problem, 1 problems."""
    from fxwarm.doctor import examine

    found = examine()
    if args.json:
        print(encode(found))
    else:
        for line in found.lines():
            console().print(line, highlight=False, markup=False, soft_wrap=True)
    return INCOMPLETE if found.problems else DONE


def clean(args: argparse.Namespace) -> int:
    """Show what lies in the caches; with ``--root`` and ``--yes`` remove what no stored plan uses."""
    from fxwarm import caches

    if args.yes and not args.root:
        raise ValueError(
            f"--yes needs at least one --root to remove from: {', '.join(caches.NAMES)}"
        )
    with busy("looking into the caches …"):
        status = caches.examine()
    names = args.root or caches.NAMES[:3]
    chosen = caches.select(status, names)
    freed = _remove(chosen) if args.yes else 0
    if args.json:
        print(
            encode({"roots": status.roots, "plans": status.plans, "unused": chosen, "freed": freed})
        )
        return DONE
    show(status.table(), as_json=False)
    for entry in chosen if args.root else ():
        console().print(
            f"unused: {entry.path} ({size(entry.bytes)})",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    volume = size(sum(entry.bytes for entry in chosen))
    if args.yes:
        print(
            f"removed {plural(len(chosen), 'entry').replace('entrys', 'entries')}, {size(freed)} free"
        )
    elif chosen:
        print(
            f"{len(chosen)} unused in {', '.join(names)}, {volume}; remove with --root NAME --yes"
        )
    return DONE


def demo(args: argparse.Namespace) -> int:
    """Trace two big models without weights, plan FlashInfer's calls, then run a small model cold and warm."""
    from fxwarm import demo as shown

    return shown.run(
        args.models, tokens=args.max_size, calls=args.calls, json=args.json, layers=args.layers
    )


def _remove(entries: list) -> int:  # type: ignore[type-arg]
    from fxwarm import caches
    from fxwarm.progress import Progress

    with Progress("removing", len(entries)) as progress:
        return caches.remove(entries, lambda entry: progress.step(entry.name, 0.0))
