"""How commands print and write: tables for people, one JSON value with ``--json``, progress on standard error."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from passes.table import WIDTH


def show(thing: Any, as_json: bool) -> None:
    """Print a record (or anything that rich can print) to standard output."""
    if as_json:
        print(thing.to_json() if hasattr(thing, "to_json") else encode(thing))
    elif console().is_terminal:
        console().print(thing, highlight=False)
    else:
        print(thing)


def console(stderr: bool = False) -> Any:
    """Return rich's console: as wide as the terminal, 120 columns into a file or a pipe."""
    from rich.console import Console

    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    width = None if is_terminal else WIDTH
    return Console(stderr=stderr, width=width, force_terminal=is_terminal, force_jupyter=False)


def encode(thing: Any) -> str:
    """Return ``thing`` as one line of JSON."""
    import msgspec

    return msgspec.json.encode(thing).decode()


def write(path: Path | None, thing: Any) -> None:
    """Write a record to ``path``, if given, in one atomic step. Raises OSError where that is not possible."""
    from fxwarm import store

    if path is not None and not store.write(path.absolute(), thing.to_json()):
        raise OSError(f"could not write {path}; choose a folder that can be written")


@contextlib.contextmanager
def busy(what: str) -> Iterator[None]:
    """Show a spinner on standard error while the block runs; nothing where that is no terminal."""
    out = console(stderr=True)
    if out.is_terminal:
        with out.status(what):
            yield
    else:
        yield
