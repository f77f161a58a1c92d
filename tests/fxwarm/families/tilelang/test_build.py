"""Building and loading real kernels on a CPU: in parallel, in other processes, once each, and never a wrong one."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import subprocess
import sys
import time

import msgspec
import pytest
import torch

import fxwarm
from fxwarm import options
from fxwarm.families.tilelang import TileLang, index, worker
from fxwarm.families.tilelang import build as build_module
from fxwarm.families.tilelang.build import build
from fxwarm.families.tilelang.statics import make_key, statics_of
from fxwarm.ops import mhc_factories as factories
from fxwarm.records import CompileKey, Planned, Target
from tests.fxwarm.families.tilelang.calls import pre
from tests.fxwarm.families.tilelang.process import START
from tests.fxwarm.families.tilelang.test_keys import planned

pytestmark = pytest.mark.skipif(not factories.has_tilelang(), reason="needs TileLang")
CPU = Target.named("cpu")
TOY = "tests.fxwarm.families.tilelang.toy:"


def three(eps: float, hidden: int = 64) -> list[Planned]:
    """Return the kernels for 1, 4 and 16 splits, of an eps that no other test uses: level one outlives a test."""
    statics = [factories.pre_statics(hidden, 4, n, eps, 1e-6, 1e-6, 2.0, 20) for n in (1, 4, 16)]
    return [Planned(make_key(factories.BIG_FUSE_CPU, s)) for s in statics]


def two(eps: float) -> list[Planned]:
    return three(eps)[:2]


def toy(name: str, **statics) -> Planned:
    return Planned(make_key(TOY + name, statics))


def ready(family: TileLang, plan) -> None:
    """Put ``plan`` on disk and forget it: as a worker does, without the seconds that one takes to start."""
    forget()
    for p in family.missing(plan, CPU):
        worker.make(p.key, CPU)
    forget()


def forget() -> None:
    """Empty every cache of this process, ours and the library's: what a new process would have."""
    from tilelang import cache

    from fxwarm.families.tilelang import compiled, load

    load._launched.clear()
    compiled._believed.clear()
    for store in cache._dispatch_map.values():
        store._memory_cache.clear()
    for path, factory in [*factories._factories.items()]:
        if not hasattr(factory, "_kernel_cache"):  # another test's stand-in
            del factories._factories[path]
            continue
        factory._kernel_cache.clear()
        factory._call_form_cache.clear()
        factory.func.p1_cache.clear()


def counts() -> tuple[int, int, int]:
    from fxwarm.families.tilelang import jit

    jit.watch()
    return jit.Counts.builds, jit.Counts.loads, jit.Counts.elaborations


def test_a_server_that_was_started_ahead_builds_and_one_of_another_environment_does_not(
    fresh, monkeypatch
):
    family = TileLang()
    here = family.library({})
    try:
        family.prepare(CPU, here)
        family.prepare(CPU, here)
        assert build_module._ahead.qsize() == 1
        ahead = build_module._ahead.get()
        build_module._ahead.put(ahead)
        build_module._end_idle(object())  # the time of an earlier one is over
        assert build_module._take_server() is ahead
        build_module._ahead.put(ahead)
        for name in ("MAX_JOBS", "TRITON_CACHE_DIR"):  # FlashInfer and Inductor set these meanwhile
            monkeypatch.setenv(name, "4")
        assert ahead.is_current()
        monkeypatch.setenv("TILELANG_CACHE_DIR", str(fresh / "elsewhere"))
        (built,) = family.build(two(1.15e-6)[:1], CPU, 1)
        assert not built.error
        assert list((fresh / "elsewhere").rglob("*.so"))
        assert not ahead.is_current()
    finally:
        build_module._end_ahead()


def test_the_parents_own_import_of_tilelang_leaves_the_server_current(fresh, monkeypatch):
    for name in build_module._BY_IMPORT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TL_TEMPLATE_PATH", "mine")
    server = build_module._Server()
    try:
        monkeypatch.setenv("PYTHONPATH", "what TileLang adds for its own children")
        monkeypatch.setenv("TVM_LIBRARY_PATH", "of the import")
        monkeypatch.setenv("TL_CUTLASS_PATH", "of the import")
        monkeypatch.syspath_prepend("site/tilelang/3rdparty/tvm/python")
        assert server.is_current()
        with monkeypatch.context() as changed:
            changed.setenv("TL_TEMPLATE_PATH", "another of mine")
            assert not server.is_current()
        monkeypatch.syspath_prepend("factories of mine")  # the server could not import them
        assert not server.is_current()
    finally:
        server.end()


def test_importing_tilelang_sets_no_other_variable():
    code = "import os, torch; a = dict(os.environ); import tilelang; print(*(os.environ.items() - a.items()))"
    environ = {n: v for n, v in os.environ.items() if n not in build_module._BY_IMPORT}
    out = subprocess.check_output([sys.executable, "-c", code], env=environ, text=True)
    names = set(re.findall(r"\('(\w+)', ", out.splitlines()[-1]))
    assert names <= {*build_module._BY_IMPORT, "PYTHONPATH"}


@pytest.mark.parametrize(
    ("count", "jobs", "at_once"), [(23, 16, 23), (45, 16, 23), (25, 16, 16), (8, 16, 16), (3, 1, 1)]
)
def test_the_last_wave_of_equal_kernels_leaves_few_cpus_idle(count, jobs, at_once):
    assert build_module.level(count, jobs) == at_once
    with options.use(options.resolve({"jobs": jobs})):
        assert build_module.level(count, jobs) == jobs


def test_two_workers_build_what_one_builds(fresh, monkeypatch):  # A6
    keys = []
    for jobs, folder in ((1, "one"), (2, "two")):
        monkeypatch.setenv("TILELANG_CACHE_DIR", str(fresh / folder))
        plan = three(1.1e-6)
        built = list(TileLang().build(plan, CPU, jobs))
        assert {b.key for b in built} == {p.key for p in plan}
        assert all(b.bytes > 1000 and b.seconds > 0 and not b.error for b in built)
        assert not TileLang().missing(plan, CPU)
        keys.append(sorted(p.name for p in (index.root() / "kernels").iterdir()))
    assert keys[0] == keys[1]
    assert len(keys[0]) == 3


def test_no_more_build_at_once_than_were_asked_for(fresh):  # A6
    folder = fresh / "counted"
    folder.mkdir()
    plan = [toy("counted", width=width, folder=str(folder)) for width in range(1, 7)]
    with options.use(options.resolve({"jobs": 4})):
        built = list(TileLang().build(plan, CPU, 4))
    assert not [b.error for b in built if b.error]
    seen = [int((folder / f"{width}.seen").read_text()) for width in range(1, 7)]
    assert max(seen) <= 4


def test_a_warmup_builds_every_kernel_ahead_of_its_load(fresh, monkeypatch):
    monkeypatch.setenv("FXWARM_CACHE_DIR", str(fresh / "fxwarm"))
    plan = [toy("scaled", width=8, factor=factor) for factor in (5.5, 6.5)]
    before = counts()[0]
    report = fxwarm.warm(fxwarm.WarmPlan(CPU, planned=tuple(plan)))
    assert {b.key for b in report.built if not b.error} == {p.key for p in plan}
    assert len(report.loaded) == 2
    assert counts()[0] == before, "in workers, not here"


def test_one_failing_build_does_not_stop_the_others(fresh):  # A6
    good = [toy("scaled", width=8, factor=0.5), toy("scaled", width=8, factor=1.5)]
    bad = [toy("broken", width=8), toy("absent", width=8), toy("scaled", colour="red")]
    built = {
        b.key: b.error for b in TileLang().build([bad[0], good[0], bad[1], bad[2], good[1]], CPU, 1)
    }
    assert [built[p.key] for p in good] == ["", ""]
    assert "no kernel of width 8" in built[bad[0].key]
    assert "cannot be imported" in built[bad[1].key]
    assert "takes width, factor, step, not colour" in built[bad[2].key]
    assert TileLang().missing([*good, *bad], CPU) == bad


def test_a_build_beyond_the_limit_is_given_up_by_name(fresh):
    plan = [toy("scaled", width=8, factor=2.5)]
    (built,) = build(plan, CPU, 1, limit=0.05)
    assert (built.key, built.error) == (
        plan[0].key,
        "no answer within 0 s; raise fxwarm.build_timeout",
    )


def test_a_fork_that_dies_or_hangs_costs_its_key_alone(fresh):
    plan = [toy(n, width=8) for n in ("deadly", "endless")] + [toy("scaled", width=8, factor=7.5)]
    dead, endless, good = (p.key for p in plan)
    errors = {b.key: b.error for b in build(plan, CPU, 3, limit=30)}
    assert errors[dead] == "the worker ended with 3: no memory left"
    assert errors[endless] == "no answer within 30 s; raise fxwarm.build_timeout"
    assert errors[good] == ""


def test_a_server_that_dies_costs_all_keys_and_says_how(fresh, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    plan = two(1.2e-6)
    built = list(build(plan, CPU, 2))
    assert len(built) == 2
    assert all("the worker ended with 1" in b.error for b in built)


def test_a_kernel_that_got_its_slot_late_has_its_whole_time():
    server = object.__new__(build_module._Server)
    server._running, server._handed, server._stuck = {}, time.monotonic(), False
    key, waits = toy("scaled", width=8).key, []

    class Answers:
        """Nothing comes while others have the slots; at the very end the kernel gets one."""

        def get(self, timeout):
            waits.append(timeout)
            if len(waits) == 1:
                server._handed, server._running[key] = time.monotonic(), contextlib.ExitStack()
                raise queue.Empty
            return worker.Answer(key)

    server._answers = Answers()
    assert server.answer(60) == worker.Answer(key)
    assert waits[0] == 60
    assert waits[1] > 30


def test_loading_twice_builds_nothing_and_elaborates_nothing(fresh):
    family, plan = TileLang(), two(1.3e-6)
    ready(family, plan)
    before = counts()
    loaded = list(family.load(plan, CPU))
    assert not [x.error for x in loaded if x.error]
    builds, loads, elaborations = (now - then for now, then in zip(counts(), before))
    assert (builds, loads) == (0, 2)
    assert elaborations <= 1  # one of each factory and process, to see that the index still holds
    assert family.verify(plan) == []
    assert family.verify(plan, elaborate=True) == []
    before = counts()
    assert not [x.error for x in family.load(plan, CPU) if x.error]
    factory = factories.get_factory(factories.BIG_FUSE_CPU)
    for p in plan:
        factory(**statics_of(p.key))
    assert counts() == before


def test_what_was_not_built_is_built_by_load(fresh):
    family, plan = TileLang(), three(1.4e-6)[:1]
    before = counts()
    assert not [x.error for x in family.load(plan, CPU) if x.error]
    assert counts()[0] - before[0] == 1
    assert family.missing(plan, CPU) == []


def test_what_is_not_loaded_is_a_gap():
    (gap,) = TileLang().verify(three(1.5e-6)[:1])
    assert "not resident" in gap.reason


def test_a_torn_or_removed_entry_is_missing_and_built_again(fresh):
    family, plan = TileLang(), two(1.6e-6)
    ready(family, plan)
    folders = [index.folder_of(index.read(p.key, CPU)) for p in plan]
    library = next(f for f in folders[0].iterdir() if f.suffix == ".so")
    library.write_bytes(library.read_bytes()[:100])
    shutil.rmtree(folders[1])
    assert family.missing(plan, CPU) == plan
    ready(family, plan)
    assert family.missing(plan, CPU) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path, other: path.write_bytes(path.read_bytes()[:200]),
        lambda path, other: path.write_bytes(other.read_bytes()),
        lambda path, other: path.write_bytes(
            path.read_bytes().replace(b'"disk_key":"', b'"disk_key":"00')
        ),
        lambda path, other: path.write_bytes(path.read_bytes().replace(b'"tir":"', b'"tir":"AAAA')),
        lambda path, other: path.unlink(),
    ],
    ids=["torn", "another's", "wrong key", "wrong code", "gone"],
)
def test_a_wrong_index_entry_never_loads_a_wrong_kernel(fresh, spoil):
    family, plan = TileLang(), two(2e-6)
    ready(family, plan)
    spoil(index.path_of(plan[1].key, CPU), index.path_of(plan[0].key, CPU))
    before = counts()
    assert not [x.error for x in family.load(plan, CPU) if x.error]
    assert counts()[0] == before[0], "the library's own entry was still there"
    assert family.verify(plan, elaborate=True) == []
    assert family.missing(plan, CPU) == []


def test_an_index_of_another_code_is_not_believed(fresh):
    """The content of one entry under another's name, key and checksum right: only the factory itself can tell."""
    family, plan = TileLang(), two(1.7e-6)
    ready(family, plan)
    entries = [index.read(p.key, CPU) for p in plan]
    swapped = msgspec.structs.replace(
        entries[0], tir=entries[1].tir, check=entries[1].check, disk_key=entries[1].disk_key
    )
    index.path_of(plan[0].key, CPU).write_bytes(msgspec.json.encode(swapped))
    before = counts()
    assert not [x.error for x in family.load(plan, CPU) if x.error]
    assert family.verify(plan, elaborate=True) == []
    assert counts()[0] == before[0]


def test_the_files_of_a_kernel_are_named(fresh):
    family, plan = TileLang(), three(1.8e-6)[:1]
    ready(family, plan)
    files = family.cached(plan)
    assert {f.name for f in files} >= {"manifest.json", "params.json"}
    assert all(f.is_file() for f in files)
    assert index.path_of(plan[0].key, CPU) in files


def test_two_processes_that_build_at_once_build_each_kernel_once(fresh):
    code = START + (
        "from tests.fxwarm.families.tilelang.test_build import two\n"
        "from fxwarm.families.tilelang import worker\n"
        "for p in two(1.9e-6): worker.make(p.key, CPU)\n"
        "print(jit.builds())\n"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    built = [int(child.communicate(timeout=120)[0].split()[-1]) for child in children]
    assert sum(built) == 2, built
    assert not TileLang().missing(two(1.9e-6), CPU)


def test_an_eager_kernel_is_resident_after_its_launch(fresh):
    family, plan = TileLang(), [toy("eager", width=8, factor=3.0)]
    ready(family, plan)
    assert not [x.error for x in family.load(plan, CPU) if x.error]
    before = counts()
    x, out = torch.ones(5, 8), torch.empty(5, 8)
    factories.get_factory(TOY + "eager")(x, out, width=8, factor=3.0)
    assert torch.equal(out, 3 * x)
    assert counts() == before
    assert family.verify(plan) == []


def test_a_kernel_file_of_another_version_is_not_looked_at(fresh, monkeypatch):
    plan = three(2.1e-6)[:1]
    path = index.path_of(plan[0].key, CPU)
    monkeypatch.setattr(index, "_version", lambda distribution: "9.9")
    index._made_from.cache_clear()
    try:
        assert index.path_of(plan[0].key, CPU) != path
    finally:
        index._made_from.cache_clear()


def test_targets_have_files_of_their_own(fresh):
    key = CompileKey("tilelang", "k", (), factories.BIG_FUSE)
    assert len({index.path_of(key, Target.named(n)) for n in ("cpu", "h200", "b200")}) == 3


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_a_machine_without_a_gpu_builds_for_hopper(fresh):
    pytest.importorskip("tilelang")
    target, family = Target.named("h200"), TileLang()
    plan = [p for p in planned(pre(7168, 8192)) if statics_of(p.key)["n_splits"] in (1, 112)]
    built = list(family.build(plan, target, 2))
    assert [b.error for b in built] == ["", ""]
    assert family.missing(plan, target) == []
    for p in plan:
        folder = index.folder_of(index.read(p.key, target))
        names = {f.name for f in folder.iterdir()}
        assert names >= {
            "device_kernel.cu",
            "host_kernel.cu",
            "executable.so",
            "params.json",
            "manifest.json",
        }
        assert b"sm_90a" in (folder / "executable.so").read_bytes()
