"""README does what it says: its Python runs and prints what stands below it, its links and result files exist."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_the_python_of_readme_prints_what_stands_below_it(fresh, capsys):
    if "fxwarm" not in torch._dynamo.list_backends(exclude_tags=()):
        pytest.skip("fxwarm is not installed here, so torch does not know the backend's name")
    (code,) = blocks("python")
    file = fresh / "example.py"  # Dynamo reads a model's source again
    file.write_text(code)
    runpy.run_path(str(file))
    printed = [line.rstrip() for line in capsys.readouterr().out.strip().splitlines()]
    wanted = [line.rstrip() for line in blocks("text")[0].strip().splitlines()]
    assert printed == wanted


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)#:]+)\)", TEXT))))
def test_a_link_leads_somewhere(path):
    assert (ROOT / path).exists()


def test_a_mark_means_one_file():
    marks = re.findall(r"^(\[.\]): \S+$", TEXT, re.MULTILINE)
    assert len(marks) == len(set(marks))


def test_each_row_of_numbers_is_in_a_committed_result():
    files = dict(re.findall(r"^(\[.\]): (\S+)$", TEXT, re.MULTILINE))
    rows = re.findall(r"^\| .* (\[.\]) \|(.*)\|$", TEXT, re.MULTILINE)
    assert len(rows) == 12
    for mark, cells in rows:
        numbers = [float(c.replace(",", "")) for c in cells.split("|") if c.strip()]
        known = _numbers(json.loads((ROOT / files[mark]).read_text()))
        for number in numbers:
            assert any(_shows(number, value) for value in known), (mark, number)


def test_the_row_of_two_ranks_holds_for_each_of_them():
    (row,) = (
        [c.strip().replace(",", "") for c in line.split("|")[2:-1]]
        for line in TEXT.splitlines()
        if line.startswith("| ") and "each rank [" in line
    )
    found = json.loads((ROOT / "tests/gpu/results/ranks-h200x2.json").read_text())
    ranks = [found["ranks"][name] for name in ("0", "1")]
    columns = ("kernels", "launches", "cold_s", None, "warm_s", "calls_after", "jit_after")
    for shown, name in zip(row, (*columns, "slowest_call_ms"), strict=True):
        if name is not None:  # seconds are those of the slower rank
            assert _shows(float(shown), max(rank[name] for rank in ranks)), name
    for name in ("kernels", "launches", "calls_after", "jit_after"):
        assert len({rank[name] for rank in ranks}) == 1, name
    assert all(rank["warm_built"] == rank["warm_jit_after"] == 0 for rank in ranks)
    built, other = (rank["built"] for rank in ranks)
    said = f"rank 0 built {built} of the {ranks[0]['kernels']} kernels and rank 1 the other {other}"
    assert said in TEXT


def _shows(shown: float, value: float) -> bool:
    digits = len(str(shown).partition(".")[2].rstrip("0"))
    return abs(value - shown) <= 0.5 * 10**-digits + 1e-9


def _numbers(value: object) -> list[float]:
    if isinstance(value, dict):
        return [n for v in value.values() for n in _numbers(v)]
    if isinstance(value, list):
        return [n for v in value for n in _numbers(v)]
    return [float(value)] if isinstance(value, int | float) and not isinstance(value, bool) else []


def test_the_commands_are_those_that_ci_runs():
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    assert len(commands) == 2
    assert all(command.startswith("python3 -m venv") for command in commands)
    assert "grep '^python3 -m venv' README.md" in (ROOT / ".ci" / "run").read_text()
