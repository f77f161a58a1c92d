"""What JITs after warmup is counted, named, and stopped where that is asked."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
import types

import pytest
import torch

import fxwarm
from fxwarm import artifacts, family, monitor, receipts, runtime, store, warmup
from fxwarm.backend import fxwarm as backend
from fxwarm.exc import JitError, OptionError
from fxwarm.families.deep_gemm.cache import Roots
from fxwarm.families.deep_gemm.watch import watch as watch_deep_gemm
from fxwarm.monitor import guards, misses, notify, watchers
from fxwarm.monitor.event import UNSURE, JitEvent
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
        misses.ran,
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


def test_what_a_warmup_did_is_told_while_it_is_at_work():
    """Told late, a load of its own would look like one of the call that compiled."""
    at_work: list[bool] = []
    end = watchers.on_drain(lambda: at_work.append(warmup.is_at_work()))
    try:
        make_warm()
    finally:
        end()
    assert at_work and all(at_work)


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


class Graph:
    """What begins and ends a capture goes through torch's own methods; tests/gpu/capture.py runs real ones."""

    def capture_begin(self) -> None:
        torch.cuda.CUDAGraph.capture_begin(self)  # type: ignore[arg-type]

    def capture_end(self) -> None:
        torch.cuda.CUDAGraph.capture_end(self)  # type: ignore[arg-type]


@pytest.fixture
def capture(monkeypatch):
    """A capture that is open as far as fxwarm can see: torch's own begin and end need a GPU."""
    for name in ("capture_begin", "capture_end"):
        monkeypatch.setattr(torch.cuda.CUDAGraph, name, lambda self: None, raising=False)

    @contextlib.contextmanager
    def opened():
        graph = Graph()
        graph.capture_begin()
        monkeypatch.setattr(runtime, "is_capturing", lambda: True)
        try:
            yield
        finally:
            monkeypatch.setattr(runtime, "is_capturing", lambda: False)
            graph.capture_end()

    return opened


@torch.no_grad()
@pytest.mark.parametrize("mode", ["count", "warn"])
def test_during_a_capture_it_is_the_worst_class_and_told_before_the_library_is_called(
    monkeypatch, capture, mode
):
    """deepseek-ai/DeepGEMM#443"""
    make_warm()
    told = []
    monkeypatch.setattr(
        toy_family, "get_kernel", lambda name: told.append(list(seen._events.values())) or 1 / 0
    )
    with fxwarm.no_jit(mode) as seen:
        assert not guards._installed
        with capture():
            assert guards._installed
            with pytest.raises(ZeroDivisionError):
                unplanned()
        assert not guards._installed, "a capture is looked at, its replays and all else are not"
    ((event,),) = told
    assert event.capturing
    assert event.severity == 3
    assert (event.op, event.key.template) == ("scale", ("4", "other"))
    assert "during a graph capture" in str(event)


@torch.no_grad()
def test_a_planned_call_in_a_capture_gives_no_event(capture):
    compiled = make_warm(max_size=64)
    with fxwarm.no_jit("raise", calls=False) as seen, capture():
        for rows in (2, 4, 8, 16, 32, 64):
            compiled(torch.randn(rows, 8))
    assert not seen


@torch.no_grad()
def test_raise_stops_what_falls_into_a_capture_also_where_no_call_is_looked_at(capture):
    make_warm()
    toy_family.events.clear()
    words = "during a graph capture"
    with pytest.raises(JitError, match=words), fxwarm.no_jit("raise", calls=False), capture():
        unplanned()
    assert toy_family.events == []


@torch.no_grad()
def test_a_load_seen_from_another_thread_knows_that_this_one_captures(monkeypatch, capture):
    """Where no guard could be put before an op, its files still tell, and no CUDA is asked from the other thread."""
    monkeypatch.setattr(guards, "install", lambda around: None)
    make_warm()
    with fxwarm.no_jit("count") as seen, capture():
        unplanned()
        watchers.drain()
    assert [(e.op, e.capturing) for e in seen] == [("scale", True)]


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
@pytest.mark.parametrize("options", [{"monitor": "count"}, {"monitor": "warn"}, {"learn": True}])
def test_watching_the_process_puts_nothing_in_front_of_the_ops(options):
    make_warm(**options)
    assert monitor.session._active
    for mode in ("count", "warn"):
        with fxwarm.no_jit(mode):
            assert not guards._installed


@pytest.mark.parametrize("how", ["no_jit", "the process"])
@pytest.mark.parametrize(
    "start", ["again", "with nothing left but what was learned", "an artifact"]
)
@torch.no_grad()
def test_learn_makes_the_next_start_cover_it(toy, how, start):
    learn = how == "the process"
    compiled = make_warm(max_size=15, learn=learn)
    saved = artifacts.pending[0].pack()
    with fxwarm.no_jit("count", learn=not learn) as seen:
        compiled(torch.randn(16, 8))
    assert ("toy", "build") in seen.counts
    assert learn == bool(fxwarm.events())
    key = CompileKey("toy", "scale", ("8", "mult16"))
    plan = fxwarm.plans()[0]
    path = store.path_of(toy / "fxwarm", receipts.warm_key(plan), "learned")
    assert WarmPlan.from_json(path.read_bytes()).keys == (key,)
    monitor.stop_process()
    for kept in (toy_family._loaded, warmup._resident, artifacts.pending, misses.ran):
        kept.clear()
    if start == "an artifact":  # which was saved before anything was learned
        artifacts.WarmCallable.unpack(artifacts.never_called, saved).make_warm()
    else:
        if start != "again":
            shutil.rmtree(toy / "toy")
            path.with_name("receipt.json").unlink()
            path.with_name("plan.json").unlink()
        torch._dynamo.reset()
        make_warm(max_size=15)
    assert "scale_8_mult16" in toy_family._loaded
    assert fxwarm.reports()[-1].status == "complete"


def default_tactic(tokens: int, width: int) -> None:
    """What the tuned library does only where its table has no entry."""


@torch.library.custom_op("toy::tuned", mutates_args=())
def tuned(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    tokens, width = x.shape
    if (1 << (tokens - 1).bit_length(), width) not in TUNED:
        default_tactic(tokens, width)
    return x * w


class Tuned(Toy):
    """Tokens by powers of two, width matched exactly: another width always misses, and the library is silent."""

    name = "tuned"

    def match(self, op):
        if op.name == "tuned":
            yield op.call(self.name, "tuned", {"x": op.arguments["x"], "w": op.arguments["w"]})

    def keys(self, calls, target, library):
        for call in calls:
            tokens, width = (int(d) for d in call["x"].dims)
            bucket = 1 << (tokens - 1).bit_length()
            yield Planned(
                CompileKey("tuned", "tuned", (f"tokens={bucket}", f"width={width}")), call
            )

    def falls_back(self, key):
        return True

    def missing(self, planned, target):
        return []

    def watch(self, report):
        module, original = sys.modules[__name__], default_tactic

        def missed(tokens, width):
            report(JitEvent("tuned", "fallback", "tuned"), before=True)
            report(JitEvent("tuned", "fallback", "tuned"))
            return original(tokens, width)

        module.default_tactic = missed
        return lambda: setattr(module, "default_tactic", original)


@torch.no_grad()
@pytest.mark.parametrize("calls", [False, True])
def test_an_axis_that_is_matched_exactly_shows_as_fallbacks_that_name_it(monkeypatch, calls):
    """flashinfer-ai/flashinfer#4598"""
    family.register(Tuned)
    keys = {CompileKey("tuned", "tuned", (f"tokens={t}", f"width={w}")) for t, w in TUNED}
    warmup._resident.update(("cpu", key) for key in keys)

    def serve():
        for tokens, width in ((8, 128), (8, 256), (64, 2048)):
            x, w = torch.ones(tokens, width), torch.full((width,), 2.0)
            assert torch.equal(torch.ops.toy.tuned(x, w), torch.full((tokens, width), 2.0))

    try:
        with fxwarm.no_jit("count", calls=calls) as seen:
            serve()
        assert seen.counts == {("tuned", "fallback"): 2}
        assert [e.key.template[1] for e in seen] == ["width=256", "width=2048"]
        assert "x=float32[8, 256]" in seen[0].shape
        misses.ran.clear()
        with pytest.raises(JitError, match="width=256"), fxwarm.no_jit("raise", calls=calls):
            serve()
        added = {(8, 256), (64, 2048)}
        monkeypatch.setattr(sys.modules[__name__], "TUNED", TUNED | added)
        with fxwarm.no_jit("count", calls=calls) as seen:
            warmup._resident.update(
                ("cpu", CompileKey("tuned", "tuned", (f"tokens={t}", f"width={w}")))
                for t, w in added
            )
            serve()
        assert seen.count == 0
    finally:
        family.unregister("tuned")


NAME = "kernel.smxx_clean_logits.0123456789abcdef0123456789abcdef"
LIBRARY = """
import os, sys, pathlib, time
root, name, what = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
if what == "build":
    work = root / "tmp" / f"{os.getpid()}-1-2-3"
    work.mkdir(parents=True)
    (work / "kernel.cu").write_text("// nothing")
    time.sleep(0.05)
    (work / "kernel.cubin").write_bytes(b"x")
    (root / "cache").mkdir(exist_ok=True)
    work.rename(root / "cache" / name)
else:
    (root / "cache" / name / "kernel.cubin").read_bytes()
"""


def deep_gemm(root, what, name=NAME):
    """Do with a cache what DeepGEMM's C++ does, in this process."""
    sys_argv, sys.argv = sys.argv, ["", str(root), name, what]
    try:
        exec(LIBRARY, {})
    finally:
        sys.argv = sys_argv
    return root / "cache" / name


@pytest.fixture(params=["fanotify", "inotify"])
def notifier(request, monkeypatch):
    """Each of the two ways in which the system tells of files."""
    kinds = {"fanotify": notify.Fanotify, "inotify": notify.Inotify}
    try:
        kinds[request.param]().close()
    except (OSError, AttributeError) as error:
        pytest.skip(f"no {request.param} here: {error}")
    if request.param == "inotify":
        monkeypatch.setattr(notify, "Fanotify", notify.Inotify)
    return request.param


def heard(root):
    """Watch a DeepGEMM cache; return what is told, and what ends it."""
    events = []
    stop = watch_deep_gemm(Roots("A", root), lambda e, moment: events.append((e, moment)))
    return events, stop


def test_deep_gemm_builds_are_seen_by_its_files_and_timed_by_them(tmp_path, notifier):
    events, stop = heard(tmp_path)
    deep_gemm(tmp_path, "build")
    watchers.drain()
    stop()
    ((event, moment),) = events
    assert (event.library, event.kind, event.op) == ("deep_gemm", "build", "smxx_clean_logits")
    assert 0.04 < event.seconds < 30, "from its source to its cubin"
    assert moment.mine is True
    assert threading.main_thread().ident in [s.thread for s in moment.sights]


def test_deep_gemm_first_loads_are_seen_by_its_files(tmp_path, notifier):
    deep_gemm(tmp_path, "build")
    events, stop = heard(tmp_path)
    deep_gemm(tmp_path, "load")
    watchers.drain()
    stop()
    assert [(e.kind, m.mine) for e, m in events] == [
        ("load", True if notifier == "fanotify" else None)
    ]


@pytest.mark.parametrize("what", ["build", "load"])
def test_what_another_process_does_to_a_shared_cache_is_not_ours(tmp_path, notifier, what):
    if what == "load":
        deep_gemm(tmp_path, "build")
    with fxwarm.no_jit("count") as seen:
        stop = watch_deep_gemm(Roots("A", tmp_path), monitor.report)
        subprocess.run([sys.executable, "-c", LIBRARY, str(tmp_path), NAME, what], check=True)
        watchers.drain()
        stop()
    if notifier == "inotify" and what == "load":  # which nobody can tell: it is said so
        assert [e.whose for e in seen] == [UNSURE]
        assert "by this process or another" in str(seen[0])
    else:
        assert not seen


def test_a_server_with_thousands_of_open_files_is_watched_like_any_other(tmp_path, notifier):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("this user may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1030)]
    try:
        events, stop = heard(tmp_path)
        deep_gemm(tmp_path, "build")
        watchers.drain()
        stop()
    finally:
        for handle in many:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [event.kind for event, _ in events] == ["build"]


def test_a_watch_whose_thread_has_ended_closes_nothing_of_others(tmp_path, notifier, monkeypatch):
    before = threading.enumerate()  # another test's process-wide monitor may watch on
    watch = FolderWatch([tmp_path], lambda entry, file, notice: None)
    (thread,) = [t for t in threading.enumerate() if t.name == "fxwarm-files" and t not in before]

    def fail():
        raise OSError("the queue is gone")

    monkeypatch.setattr(watch._notifier, "read", fail)
    (tmp_path / "entry").mkdir()
    thread.join(10)
    mine, written = os.pipe()
    others = [os.dup(written) for _ in range(8)]  # numbers that the watch had
    watch.drain()
    watch.stop()
    os.set_blocking(mine, False)
    with pytest.raises(BlockingIOError):
        os.read(mine, 1)
    for handle in (mine, written, *others):
        os.close(handle)


def test_a_forked_child_hears_of_its_own_work_and_its_parent_does_not(tmp_path, notifier):
    with fxwarm.no_jit("count") as seen:
        stop = watch_deep_gemm(Roots("A", tmp_path), monitor.report)
        pid = os.fork()
        if pid == 0:
            try:
                deep_gemm(tmp_path, "build")
                os._exit(0 if [e.kind for e in seen] == ["build"] else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert not seen
        stop()


def test_without_any_notices_new_entries_are_still_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(notify, "open_notifier", lambda folder: None)
    told = []
    watch = FolderWatch(
        [tmp_path / "cache"], lambda entry, file, _: told.append((entry.name, file))
    )
    deep_gemm(tmp_path, "build")
    watch.drain()
    watch.drain()
    watch.stop()
    assert told == [(NAME, "")]
    assert not watch.sees_opens
    events, stop = heard(tmp_path)
    deep_gemm(tmp_path, "build", NAME.replace("0", "f"))
    watchers.drain()
    stop()
    assert [m.mine for _, m in events] == [None]


def test_what_a_warmup_does_to_the_cache_is_no_event(tmp_path, notifier):
    with fxwarm.no_jit("count") as seen:
        stop = watch_deep_gemm(Roots("A", tmp_path), monitor.report)
        warmup._at_work.add("a warmup")
        try:
            deep_gemm(tmp_path, "build")
            watchers.drain()
        finally:
            warmup._at_work.clear()
        stop()
    assert not seen


def test_a_thread_of_a_server_is_found_by_its_call(notifier):
    """The call is told from the stack of the thread that makes it, whatever the others do."""
    make_warm()

    def request():
        with torch.no_grad():
            unplanned(35)

    with fxwarm.no_jit("count") as seen:
        thread = threading.Thread(target=request)
        thread.start()
        thread.join()
    assert [e.shape for e in seen] == ["x=float32[35, 4], w=float32[4]"]
    assert "in unplanned" in seen[0].place


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


def test_cute_compiles_are_named_timed_and_stopped(monkeypatch):
    """With the real CuTe DSL, which compiles without a GPU where the architecture is named."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    cute = pytest.importorskip("cutlass.cute")
    from cutlass.cutlass_dsl.cutlass import CutlassBaseDSL

    from tests.cute_toy import launch

    before = CutlassBaseDSL.compile_and_cache
    with fxwarm.no_jit("count") as seen:
        cute.compile(launch, 3)
    (event,) = seen
    assert (event.library, event.kind) == ("cute", "build")
    assert "launch" in event.op
    assert event.seconds > 0
    assert "test_monitor.py" in event.place
    with pytest.raises(JitError, match="cute build"), fxwarm.no_jit("raise"):
        cute.compile(launch, 4)
    assert CutlassBaseDSL.compile_and_cache is before


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
