"""No warmup loads into a graph capture: it waits for those of other threads, and is tried again after its own."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from fxwarm import artifacts, captures, exc, family, runtime, warmup
from fxwarm.options import Options
from fxwarm.warmup import Warmup
from tests import toy_family
from tests.fault_child import shapes
from tests.toy_family import Toy


class Graph:
    """What begins and ends a capture goes through torch's own methods; tests/gpu/capture.py runs real ones."""

    def capture_begin(self) -> None:
        torch.cuda.CUDAGraph.capture_begin(self)  # type: ignore[arg-type]

    def capture_end(self) -> None:
        torch.cuda.CUDAGraph.capture_end(self)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def toy(fresh, monkeypatch):
    for name in ("capture_begin", "capture_end"):
        monkeypatch.setattr(torch.cuda.CUDAGraph, name, lambda self: None, raising=False)
    captures.install()
    family.register(Toy)
    for kept in (toy_family._loaded, toy_family.events, warmup._resident, artifacts.pending):
        kept.clear()
    yield
    captures._open.clear()
    family.unregister("toy")


def make_warmup(**options):
    return Warmup(shapes((3,)), Options(**options), device=torch.device("cpu"))


def test_a_warmup_waits_for_the_capture_of_another_thread_and_then_warms():
    graph, opened, close = Graph(), threading.Event(), threading.Event()
    at_end: list[int] = []

    def serve():
        graph.capture_begin()
        opened.set()
        close.wait(30)
        at_end.append(len(toy_family.events))
        graph.capture_end()

    thread = threading.Thread(target=serve)
    thread.start()
    opened.wait(30)
    one = make_warmup()
    warming = threading.Thread(target=one.finish)
    warming.start()
    time.sleep(0.5)
    assert toy_family.events == [], "nothing is built or loaded meanwhile"
    assert one.report is None
    close.set()
    thread.join()
    warming.join(30)
    assert at_end == [0]
    assert one.report.status == "complete"
    assert [kind for kind, _ in toy_family.events].count("load") == 3


def test_a_warmup_in_its_own_capture_is_refused_and_may_be_tried_again(monkeypatch):
    one = make_warmup()
    monkeypatch.setattr(runtime, "is_capturing", lambda: True)
    with pytest.raises(exc.ColdCaptureError, match=r"warm_all\(\) before the capture, or again"):
        one.finish()
    assert toy_family.events == []
    monkeypatch.setattr(runtime, "is_capturing", lambda: False)
    assert one.finish().status == "complete"


@pytest.mark.parametrize("strict", [False, True])
def test_a_cold_model_called_in_a_capture_is_an_error_and_warms_at_the_next_call(
    monkeypatch, caplog, strict
):
    calls = []
    warm = artifacts.WarmCallable(lambda *args: calls.append(args), make_warmup(strict=strict))
    monkeypatch.setattr(artifacts, "is_capturing", lambda: True)
    monkeypatch.setattr(runtime, "is_capturing", lambda: True)
    x = torch.ones(3)
    if strict:
        with pytest.raises(exc.ColdCaptureError, match="this model is cold"):
            warm(x)
        with pytest.raises(exc.ColdCaptureError):
            warm.make_warm()
    else:
        warm(x)
        assert "this model is cold" in caplog.text
        assert warm.make_warm() is None
    assert toy_family.events == []
    monkeypatch.setattr(artifacts, "is_capturing", lambda: False)
    monkeypatch.setattr(runtime, "is_capturing", lambda: False)
    warm(x)
    assert warm.warmup.report.status == "complete"
    assert len(calls) == (1 if strict else 2)


def test_a_capture_begins_after_a_load_in_another_thread_has_ended():
    began: list[float] = []

    def serve():
        graph = Graph()
        graph.capture_begin()
        began.append(time.monotonic())
        graph.capture_end()

    with warmup._load_lock:
        thread = threading.Thread(target=serve)
        thread.start()
        time.sleep(0.3)
        assert not began
    thread.join(30)
    assert began


def test_the_end_of_one_capture_does_not_undo_the_beginning_of_the_next():
    said: list[str] = []
    ending, go = threading.Event(), threading.Event()

    def on_end():
        ending.set()
        go.wait(0.5)
        said.append("end")

    stop = captures.listen(lambda: said.append("begin"), on_end)
    first, second = Graph(), Graph()
    first.capture_begin()
    one = threading.Thread(target=lambda: (ending.wait(10), second.capture_begin(), go.set()))
    one.start()
    first.capture_end()
    one.join(30)
    stop()
    assert said == ["begin", "end", "begin"]


def test_a_capture_that_never_ends_is_given_up_and_said(monkeypatch, caplog):
    monkeypatch.setattr(captures, "LONGEST", 0.3)
    monkeypatch.setattr(captures, "SAY_AFTER", 0.1)
    thread = threading.Thread(target=lambda: Graph().capture_begin(), name="broken")
    thread.start()
    thread.join()
    captures.wait()
    assert "waiting for the graph capture of" in caplog.text
    assert "a capture has been open" in caplog.text


def test_a_fork_does_not_wait_for_the_captures_of_its_parent():
    captures._open.add(-1)  # of a thread that the fork has not
    pid = os.fork()
    if pid == 0:
        captures.wait()
        os._exit(int(bool(captures._open)))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert captures._open == {-1}


def test_a_begin_that_fails_leaves_no_capture_open(monkeypatch):
    def refuse(self):
        raise RuntimeError("no")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", refuse, raising=False)
    captures.install()
    with pytest.raises(RuntimeError, match="no"):
        Graph().capture_begin()
    assert not captures._open
