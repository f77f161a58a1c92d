"""Writes what a GPU run measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]


def write(out: str | Path, figures: Any) -> None:
    """Write ``figures`` as JSON to ``out``; files of this checkout are named from it, wherever it lies."""
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=1).replace(f"{CHECKOUT}/", "") + "\n")
