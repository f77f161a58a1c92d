"""Run a piece of Python in a process of its own and read the JSON that it prints last."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

START = """
import json, torch
from fxwarm.families.tilelang import TileLang, jit
from fxwarm.records import Planned, Target
from tests.fxwarm.families.tilelang.calls import post, pre
from tests.fxwarm.families.tilelang.test_keys import LIBRARY, planned
from tests.fxwarm.ops.test_mhc import ARGS, layer
CPU, family = Target.named("cpu"), TileLang()
"""


def run(code: str, timeout: float = 120) -> dict:
    """Return what ``code`` prints last. ``START`` runs before it."""
    text = START + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])
