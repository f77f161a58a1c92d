"""Long work shows itself: a bar on a terminal, a line a step in the log elsewhere, and what failed at once."""

from __future__ import annotations

import logging
import sys

import pytest

from fxwarm import progress as module
from fxwarm.progress import Progress


@pytest.fixture
def terminal(monkeypatch):
    """Return what makes stderr a terminal, or none."""

    def make(answer: bool) -> None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: answer, raising=False)
        if answer:
            monkeypatch.setenv("TERM", "xterm")
            monkeypatch.setenv("FORCE_COLOR", "1")

    return make


def test_elsewhere_each_step_is_a_line_and_the_whole_is_one(terminal, caplog, capsys):
    terminal(False)
    with caplog.at_level(logging.INFO, "fxwarm"), Progress("building toy", 2) as progress:
        progress.step("a", 1.5)
        progress.step("b", 0.5, "no such header")
    lines = [r.getMessage() for r in caplog.records]
    assert lines[0] == "fxwarm: building toy 1/2 a: 1.5 s"
    assert lines[1] == "fxwarm: building toy 2/2 b: failed: no such header"
    assert caplog.records[1].levelno == logging.ERROR
    assert lines[2].startswith("fxwarm: building toy: 2 of 2 in ")
    assert len(lines) == 3
    assert capsys.readouterr().err == ""


def test_on_a_terminal_there_is_a_bar_that_goes_when_it_is_done(terminal, capsys):
    terminal(True)
    with Progress("building toy", 2) as progress:
        (line,) = module._bar.tasks
        progress.step("a", 1.5)
        assert (line.completed, line.total) == (1, 2)
        progress.step("b", 1.5)
        assert line.finished
    assert "building toy" in capsys.readouterr().err


def test_one_step_needs_no_bar(terminal):
    terminal(True)
    with Progress("building toy", 1) as progress:
        assert progress._line is None


def test_a_stream_has_a_bar_without_an_end(terminal):
    terminal(True)
    with Progress("building toy", 0) as progress:
        (line,) = module._bar.tasks
        progress.step("a", 1.5)
        assert (line.completed, line.total) == (1, None)


def test_a_stream_counts_what_it_has_seen(terminal, caplog):
    terminal(False)
    with caplog.at_level(logging.INFO, "fxwarm"), Progress("building toy", 0) as progress:
        for name in "abc":
            progress.step(name, 0.1)
    assert [r.getMessage().split()[3] for r in caplog.records[:3]] == ["1/1", "2/2", "3/3"]
