"""Every way torch saves and loads a compiled model: a fresh process serves without JIT work.

Each stage is a process of its own; `python tests/load_paths.py all FOLDER` runs them on any torch and prints a table.
"""

from __future__ import annotations

import pytest

from tests import load_paths

SLOW = pytest.mark.slow
TOO = ("aot_inputs", "precompile", "package_op")
"""Each has a sibling that goes the same way and is quicker, or a test of its own."""
CHOICE = [
    *(
        pytest.param("toy", path, marks=[SLOW] if path in TOO else [])
        for path in load_paths.paths_of("toy")
    ),
    *(
        pytest.param(
            "mhc", path, marks=[] if path in ("disk", "aot_compile", "package") else [SLOW]
        )
        for path in load_paths.paths_of("mhc")
    ),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "path"), CHOICE)
def test_a_fresh_process_serves_without_jit_work(model, path, tmp_path):
    if model == "mhc":
        pytest.importorskip("tilelang")
    saved, loaded = (load_paths.run_stage(path, what, tmp_path, model) for what in ("save", "load"))
    for stage in (saved, loaded):
        assert "error" not in stage, stage["error"]
        assert stage["right"] and stage["jit"] == [], stage
    if path.startswith("package"):  # nothing ran where it was saved, so nothing was built there
        assert loaded["loaded"] >= 3 and set(loaded["reports"]) == {"complete"}
        return
    assert loaded["built"] == 0 and loaded["loaded"] == saved["loaded"] > 0
    assert loaded["keys"] == saved["keys"]
    assert set(loaded["reports"]) == {"complete"}, loaded
    # The same graph has the same key in two processes; an artifact without a graph carries it.
    assert loaded.get("warm_keys") == saved.get("warm_keys")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "path",
    [
        "mega_cache",
        "aot_compile",
        pytest.param("aot_inputs", marks=SLOW),
        pytest.param("disk", marks=SLOW),
        pytest.param("precompile", marks=SLOW),
        pytest.param("precompile_mega_cache", marks=SLOW),
        pytest.param("package", marks=SLOW),
    ],
)
def test_what_fxwarm_saved_loads_where_fxwarm_is_not_installed(path, tmp_path):
    saved = load_paths.run_stage(path, "save", tmp_path, "plain")
    assert "error" not in saved, saved["error"]
    loaded = load_paths.run_stage(path, "blind", tmp_path, "plain")
    assert loaded.get("right") is True and loaded["loaded"] is True, loaded


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("path", "missing"),
    [
        ("aot_compile", "No module named 'fxwarm'"),
        pytest.param("aot_inputs", "No module named 'fxwarm'", marks=SLOW),
        pytest.param("package_op", "fxwarm::ensure_warm", marks=SLOW),
    ],
)
def test_what_was_asked_to_warm_itself_anywhere_needs_fxwarm_to_load(path, missing, tmp_path):
    saved = load_paths.run_stage(path, "save", tmp_path, "plain", FXWARM_EMBED="1")
    assert "error" not in saved, saved["error"]
    assert missing in load_paths.run_stage(path, "blind", tmp_path, "plain")["error"]


def test_a_stage_that_hangs_is_cut_and_says_where_it_was(tmp_path):
    hanging = {"TOY_BUILD_SECONDS": "60"}
    cut = load_paths.run_stage("disk", "save", tmp_path, "toy", limit=8.0, **hanging)
    assert cut["error"].startswith("cut after 8 s: Timeout (0:00:08)"), cut
    assert "(most recent call first)" in cut["error"]
    assert "load_stages.py" in cut["error"]
