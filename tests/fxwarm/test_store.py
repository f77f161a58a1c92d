from __future__ import annotations

import logging
import os
import stat

import pytest

from fxwarm import store
from fxwarm.records import Target, WarmPlan


@pytest.fixture
def plan():
    return WarmPlan(Target("cpu", device="cpu"))


def test_what_is_written_is_read_back(tmp_path, plan):
    path = store.path_of(tmp_path, "abc123", "plan")
    assert store.write(path, plan.to_json())
    assert store.read(path, WarmPlan) == plan
    assert [p.name for p in path.parent.iterdir()] == ["plan.json"], "no temporary file stays"


@pytest.mark.parametrize("key", ["../../etc/passwd", "", "a/b", "x" * 200, "."])
def test_a_key_that_is_no_key_never_becomes_a_path(tmp_path, key):
    with pytest.raises(ValueError, match="is no warm key"):
        store.path_of(tmp_path, key, "plan")


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", '{"kind":"other"}', "[" * 10000, '{"kind":"fxwarm.WarmPlan","schema":99}'],
)
def test_what_cannot_be_believed_counts_as_absent_and_says_why(tmp_path, text, caplog):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert store.read(path, WarmPlan) is None
    assert "ignoring" in caplog.text


def test_a_truncated_plan_counts_as_absent(tmp_path, plan):
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json()[:-20])
    assert store.read(path, WarmPlan) is None


def test_a_file_that_anybody_may_write_is_not_believed(tmp_path, plan, caplog):
    path = tmp_path / "plan.json"
    store.write(path, plan.to_json())
    path.chmod(path.stat().st_mode | stat.S_IWOTH)
    assert store.read(path, WarmPlan) is None
    assert "anybody may write it" in caplog.text


def test_an_unusable_root_becomes_a_temporary_one_and_says_so(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    store._root.cache_clear()
    folder = store.root(str(blocked / "below"))
    assert os.access(folder, os.W_OK) and "will not be kept" in caplog.text
