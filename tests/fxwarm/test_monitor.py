"""What JITs after warmup is counted, named, and stopped where that is asked."""

from __future__ import annotations

import json
import logging
import sys
import time
import types

import pytest
import torch

import fxwarm
from fxwarm import artifacts, family, monitor, receipts, runtime, store, warmup
from fxwarm.backend import fxwarm as backend
from fxwarm.exc import JitError, OptionError
from fxwarm.families.deep_gemm.cache import CODE, CUBIN, Roots
from fxwarm.families.deep_gemm.watch import watch as watch_deep_gemm
from fxwarm.monitor import guards, watchers
from fxwarm.monitor.files import FolderWatch
from fxwarm.records import CompileKey, Planned, WarmPlan
from tests import toy_family
from tests.toy_family import Toy

TUNED = {(2**i, width) for i in range(7) for width in (0, 128, 512)}


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    return str(tmp_path_factory.mktemp("inductor"))


@pytest.fixture(autouse=True)
def toy(fresh, monkeypatch, compiled_once):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", compiled_once)  # the graphs here are alike
    family.register(Toy)
    for kept in (
        toy_family._loaded,
        toy_family.events,
        warmup._resident,
        artifacts.pending,
        guards._ran,
    ):
        kept.clear()
    yield fresh
    monitor.stop_process()
    assert not monitor.session._active, "nothing stays behind"
    assert not guards._installed
    family.unregister("toy")


class Model(torch.nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((width,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.toy.scale(x + 1, self.w)


def make_warm(**options: object) -> object:
    compiled = torch.compile(
        Model(), backend=backend, options={f"fxwarm.{k}": v for k, v in options.items()}
    )
    with torch.no_grad():
        compiled(torch.randn(5, 8))
    return compiled


def unplanned(rows: int = 33, width: int = 4) -> torch.Tensor:
    """A call that no graph contains."""
    return torch.ops.toy.scale(torch.ones(rows, width), torch.full((width,), 2.0))


@torch.no_grad()
def test_a_full_pass_over_planned_sizes_gives_no_event():
    compiled = make_warm(max_size=64)
    with fxwarm.no_jit("raise") as seen:
        for rows in range(2, 65):
            compiled(torch.randn(rows, 8))
    assert seen.count == 0
    assert not seen


@torch.no_grad()
def test_warn_names_op_key_shape_place_and_seconds_once_and_the_result_is_right(caplog):
    """vllm-project/vllm#43009"""
    make_warm()
    with fxwarm.no_jit("warn") as seen, caplog.at_level(logging.WARNING, "fxwarm"):
        assert torch.equal(unplanned(), torch.full((33, 4), 2.0))
        unplanned()
        unplanned(35)
    (event,) = seen
    assert (event.library, event.kind, event.op) == ("toy", "build", "scale")
    assert event.key == CompileKey("toy", "scale", ("4", "other"))
    assert "x=float32[33, 4]" in event.shape
    assert "test_monitor.py" in event.place
    assert event.seconds > 0.01
    assert not event.capturing
    assert "nothing there with 4 (planned: 8)" in event.missing_from
    assert caplog.text.count("toy build: scale scale<4, other>") == 1
    with fxwarm.no_jit("warn") as again:
        unplanned()
    assert not again, "it is resident now"


@torch.no_grad()
def test_raise_comes_before_the_build_starts():
    make_warm()
    toy_family.events.clear()
    words = r"toy build: scale scale<4, other> for x=float32\[33, 4\]"
    with pytest.raises(JitError, match=words), fxwarm.no_jit("raise"):
        unplanned()
    assert toy_family.events == []


@torch.no_grad()
def test_what_is_on_disk_is_a_load_not_a_build():
    make_warm()
    toy_family.compile_kernel("scale_4_other")
    with fxwarm.no_jit("count") as seen:
        unplanned()
    assert seen.counts == {("toy", "load"): 1}


@torch.no_grad()
def test_a_size_beyond_the_declared_bound_is_reported_as_that():
    compiled = make_warm(max_size=15)  # no multiple of 16 is planned
    with fxwarm.no_jit("count") as seen:
        compiled(torch.randn(16, 8))
    (event,) = (e for e in seen if e.library == "toy")
    assert event.beyond == "x.shape[0] = 16, declared 1..15"
    assert "test_monitor.py" in event.place
    assert "fxwarm.max_size" in str(event)


@torch.no_grad()
def test_a_new_graph_at_batch_one_is_a_stall_and_raise_stops_it():
    compiled = make_warm()
    with fxwarm.no_jit("count") as seen:
        compiled(torch.randn(1, 8))
    (event,) = seen
    assert (event.library, event.kind) == ("dynamo", "retrace")
    assert event.seconds > 0
    assert "test_monitor.py" in event.place
    torch._dynamo.reset()
    compiled = make_warm()
    with pytest.raises(JitError, match="dynamo retrace"), fxwarm.no_jit("raise"):
        compiled(torch.randn(1, 8))
    compiled(torch.randn(1, 8))  # and nothing is broken by it


@torch.no_grad()
def test_during_a_capture_it_is_the_worst_class_and_told_before_the_library_is_called(monkeypatch):
    """deepseek-ai/DeepGEMM#443"""
    make_warm()
    monkeypatch.setattr(runtime, "is_capturing", lambda: True)
    told = []
    monkeypatch.setattr(
        toy_family, "get_kernel", lambda name: told.append(list(seen._events.values())) or 1 / 0
    )
    with fxwarm.no_jit("count") as seen, pytest.raises(ZeroDivisionError):
        unplanned()
    ((event,),) = told
    assert event.capturing
    assert event.severity == 3
    assert "during a graph capture" in str(event)


@torch.no_grad()
def test_the_option_watches_the_process_and_its_events_can_be_read(monkeypatch):
    monkeypatch.setenv("FXWARM_MONITOR", "raise")
    compiled = make_warm()
    compiled(torch.randn(7, 8))
    assert fxwarm.events() == []
    with pytest.raises(JitError):
        unplanned()
    assert [e.op for e in fxwarm.events()] == ["scale"]


@torch.no_grad()
def test_another_model_may_compile_while_the_process_is_watched():
    make_warm(monitor="raise")
    compiled = torch.compile(Model(16), backend=backend)
    compiled(torch.randn(5, 16))
    assert all(e.library == "dynamo" for e in fxwarm.events()), "the code of both is the same"


@torch.no_grad()
def test_counting_the_process_puts_nothing_in_front_of_the_ops():
    make_warm(monitor="count")
    assert monitor.session._active
    assert not guards._installed


@torch.no_grad()
def test_learn_makes_the_next_start_cover_it(toy):
    compiled = make_warm(max_size=15)
    with fxwarm.no_jit("count", learn=True) as seen:
        compiled(torch.randn(16, 8))
    assert ("toy", "build") in seen.counts
    plan = fxwarm.plans()[0]
    path = store.path_of(toy / "fxwarm", receipts.warm_key(plan), "plan")
    assert CompileKey("toy", "scale", ("8", "mult16")) in WarmPlan.from_json(path.read_bytes()).keys
    for kept in (toy_family._loaded, warmup._resident, artifacts.pending, guards._ran):
        kept.clear()
    torch._dynamo.reset()
    make_warm(max_size=15)
    assert "scale_8_mult16" in toy_family._loaded


class Tuned(Toy):
    """Tokens by powers of two, width matched exactly: another width always misses."""

    def keys(self, calls, target, library):
        for call in calls:
            tokens, width = (int(d) for d in call["x"].dims)
            bucket = 1 << (tokens - 1).bit_length()
            yield Planned(CompileKey("toy", "scale", (f"tokens={bucket}", f"width={width}")), call)

    def falls_back(self, key):
        return True

    def missing(self, planned, target):
        return []


@torch.no_grad()
def test_an_axis_that_is_matched_exactly_shows_as_fallbacks_that_name_it(monkeypatch):
    """flashinfer-ai/flashinfer#4598"""
    family.register(Tuned, replace=True)
    keys = {CompileKey("toy", "scale", (f"tokens={t}", f"width={w}")) for t, w in TUNED}
    warmup._resident.update(("cpu", key) for key in keys)
    served = ((8, 128), (8, 256), (64, 2048))
    with fxwarm.no_jit("count") as seen:
        for tokens, width in served:
            assert torch.equal(unplanned(tokens, width), torch.full((tokens, width), 2.0))
    assert seen.counts == {("toy", "fallback"): 2}
    assert [e.key.template[1] for e in seen] == ["width=256", "width=2048"]
    guards._ran.clear()
    warmup._resident.update(("cpu", e.key) for e in list(seen))
    with fxwarm.no_jit("count") as seen:
        for tokens, width in served:
            unplanned(tokens, width)
    assert seen.count == 0


def entry(root, name="kernel.smxx_clean_logits.0123456789abcdef0123456789abcdef"):
    folder = root / "cache" / name
    temporary = root / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    (temporary / CODE).write_text("// nothing")
    (temporary / CUBIN).write_bytes(b"x")
    folder.parent.mkdir(exist_ok=True)
    temporary.rename(folder)
    return folder


def test_deep_gemm_builds_and_first_loads_are_seen_by_its_files(tmp_path):
    events = []
    stop = watch_deep_gemm(Roots("A", tmp_path), lambda e, **kw: events.append(e.kind))
    folder = entry(tmp_path)
    watchers.drain()
    assert events == ["build"]
    stop()
    events.clear()
    stop = watch_deep_gemm(
        Roots("A", tmp_path), lambda e, **kw: events.append((e.kind, folder.name in e.shape))
    )
    (folder / CUBIN).read_bytes()
    watchers.drain()
    stop()
    assert ("load", True) in events


def test_without_inotify_new_entries_are_still_seen(tmp_path, monkeypatch):
    monkeypatch.setattr("fxwarm.monitor.files._open_inotify", lambda: -1)
    told = []
    watch = FolderWatch([tmp_path / "cache"], lambda entry, file: told.append((entry.name, file)))
    folder = entry(tmp_path)
    watch.drain()
    watch.drain()
    assert told == [(folder.name, "")]
    assert not watch.sees_opens


def test_what_a_warmup_does_to_the_cache_is_no_event(tmp_path):
    with fxwarm.no_jit("count", calls=False) as seen:
        stop = watch_deep_gemm(Roots("A", tmp_path), monitor.report)
        warmup._at_work.add("a warmup")
        try:
            entry(tmp_path)
            watchers.drain()
        finally:
            warmup._at_work.clear()
        stop()
    assert not seen


def test_triton_is_watched_by_its_hooks_and_others_hooks_still_run(monkeypatch):
    calls = []
    runtime = types.SimpleNamespace(
        jit_cache_hook=lambda **kw: calls.append("theirs before"), jit_post_compile_hook=None
    )
    fake = types.SimpleNamespace(knobs=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "triton", fake)
    given = {
        "key": "k",
        "repr": "add[n: i32]",
        "fn": types.SimpleNamespace(name="add"),
        "is_manual_warmup": False,
    }
    with fxwarm.no_jit("count") as seen:
        runtime.jit_cache_hook(**given)
        time.sleep(0.002)
        runtime.jit_post_compile_hook(**given)
    (event,) = seen
    assert (event.library, event.op) == ("triton", "add")
    assert event.seconds > 0.001
    assert calls == ["theirs before"]
    assert runtime.jit_post_compile_hook is None
    with pytest.raises(JitError, match="triton build"), fxwarm.no_jit("raise"):
        runtime.jit_cache_hook(**given)


def test_tilelang_is_stopped_before_it_compiles():
    pytest.importorskip("tilelang")
    from tilelang.jit.kernel import JITKernel

    before = JITKernel.__init__
    with fxwarm.no_jit("raise"), pytest.raises(JitError, match="tilelang build"):
        JITKernel(None)
    from fxwarm.families.tilelang import jit

    assert jit._watching
    assert JITKernel.__init__.__name__ == before.__name__


def test_another_mode_is_one_clear_error():
    with pytest.raises(OptionError, match="give 'count', 'warn' or 'raise'"), fxwarm.no_jit("warm"):
        pass


def test_events_go_to_json_and_read_as_a_table():
    make_warm()
    with fxwarm.no_jit("count") as seen:
        unplanned()
    import msgspec

    data = msgspec.json.encode(seen[0])
    assert msgspec.json.decode(data, type=type(seen[0])) == seen[0]
    assert json.loads(data)["kind"] == "build"
    assert "1 builds" in str(seen)
    assert "scale<4, other>" in str(seen)
