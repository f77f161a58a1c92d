"""What can go wrong in a warmup, done for real in processes: afterwards everything is usable, and the reason was said."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import msgspec
import pytest

from fxwarm import receipts, store
from fxwarm.families.deep_gemm.cache import Roots, is_whole_elf, publish, scratch
from fxwarm.records import CompileKey, Planned, Source, Target, WarmPlan, WarmReport
from tests import fault_child

WIDTHS = (3, 5)
KERNELS = 6


@pytest.fixture(scope="module")
def context():
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["tests.fault_child"])
    return found


class Machine:
    """A private machine: its caches, and processes on it."""

    def __init__(self, folder: Path, context) -> None:
        self.folder, self.context, self.count = folder, context, 0
        self.toy, self.fx = folder / "toy", folder / "fxwarm"

    def start(self, function: str, *args, env=None, **kwargs):
        self.count += 1
        out = self.folder / f"out{self.count}.json"
        given = {
            "TOY_CACHE_DIR": str(self.toy),
            "FXWARM_CACHE_DIR": str(self.fx),
            "OUT": str(out),
            **(env or {}),
        }
        process = self.context.Process(
            target=getattr(fault_child, function), args=(given, *args), kwargs=kwargs
        )
        process.out = Path(given["OUT"])
        process.start()
        return process

    def end(self, process, timeout: float = 60):
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            pytest.fail(f"it hangs: {self.log(process)[-2000:]}")
        assert process.exitcode == 0, self.log(process)[-3000:]
        done = json.loads(process.out.read_text())
        done["report"] = msgspec.convert(done["report"], WarmReport | None)
        return done

    def run(self, function: str, *args, env=None, **kwargs):
        return self.end(self.start(function, *args, env=env, **kwargs))

    def warm(self, widths=WIDTHS, *, env=None, **options):
        return self.run("warm", widths, env=env, **options)["report"]

    def log(self, process) -> str:
        path = process.out.with_suffix(".log")
        return path.read_text() if path.exists() else ""

    @property
    def last_log(self) -> str:
        return (self.folder / f"out{self.count}.log").read_text()

    def builds(self) -> list[str]:
        """What was compiled on this machine, by whom and when it does not matter."""
        path = self.toy / "builds.log"
        return [line.split()[1] for line in path.read_text().splitlines()] if path.exists() else []

    def check_caches(self) -> None:
        """No half entry: each kernel is whole, each stored file is a record."""
        entries = [p for p in self.toy.iterdir() if p.name.startswith("scale_")]
        assert all(is_whole_elf(p / "kernel.so") for p in entries), entries
        for path in self.fx.rglob("*.json"):
            (WarmPlan if path.name == "plan.json" else WarmReport).from_json(path.read_bytes())


@pytest.fixture
def machine(tmp_path, context):
    return Machine(tmp_path, context)


def wait_for(path: Path, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} never came"
        time.sleep(0.005)


@pytest.mark.parametrize("times", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_random_moments_a_clean_start_completes(machine, times):
    chance = random.Random(times)
    exits, widths = [], WIDTHS
    for width in range(7, 7 + times):  # each start has something left to build
        widths = (*widths, width)
        # three kernels at 0.3 s each: no machine is done before the kill
        process = machine.start("warm", widths, env={"TOY_BUILD_SECONDS": "0.3"})
        time.sleep(chance.uniform(0.05, 0.6))
        process.kill()
        process.join()
        exits.append(process.exitcode)
    assert -signal.SIGKILL in exits
    report = machine.warm(widths)
    assert report.status == "complete"
    assert len(report.loaded) == 3 * len(widths)
    machine.check_caches()
    assert machine.warm(widths).built == ()


def test_eight_processes_at_once_build_each_kernel_once(machine):
    processes = [machine.start("warm", WIDTHS, env={"TOY_BUILD_SECONDS": "0.05"}) for _ in range(8)]
    reports = [machine.end(p)["report"] for p in processes]
    assert [r.status for r in reports] == ["complete"] * 8
    assert len(machine.builds()) == len(set(machine.builds())) == KERNELS
    machine.check_caches()


def test_when_the_holder_of_a_lock_is_killed_the_others_go_on_and_say_who_it_was(machine):
    holder = machine.start("hold_lock", "scale_3_one")
    wait_for(holder.out)
    waiting = machine.start("warm_impatiently", (3,))
    time.sleep(1.0)
    assert waiting.is_alive()
    begin = time.monotonic()
    holder.kill()
    assert machine.end(waiting)["report"].status == "complete"
    assert time.monotonic() - begin < 5
    assert f"pid {holder.pid} on " in machine.log(waiting)


@pytest.fixture
def mount(tmp_path):
    """Mount a file system for the length of a test, where this user may."""
    mounted: list[str] = []

    def make(*arguments: str) -> None:
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"this user may not mount: {done.stderr.strip()}")
        mounted.append(arguments[-1])

    yield make
    for place in reversed(mounted):
        subprocess.run(["umount", "-l", place], check=False)


def test_a_full_disk_is_reported_and_the_next_start_completes(machine, mount):
    machine.toy.mkdir()
    mount("-t", "tmpfs", "-o", "size=40k", "tmpfs", str(machine.toy))
    process = machine.start("warm", WIDTHS, model=False)
    report = machine.end(process)["report"]
    assert report.status == "partial"
    assert "No space left" in str(report) or "cc exited" in str(report)
    assert not list(machine.fx.rglob("receipt.json")), "no receipt of what is not complete"
    subprocess.run(["mount", "-o", "remount,size=16m", str(machine.toy)], check=True)
    assert machine.warm().status == "complete"
    machine.check_caches()


def test_a_full_disk_of_our_own_costs_the_receipt_only(machine, mount):
    machine.fx.mkdir()
    mount("-t", "tmpfs", "-o", "size=4k", "tmpfs", str(machine.fx))
    assert machine.warm().status == "complete"
    assert "could not write" in machine.last_log
    assert not list(machine.fx.rglob("receipt.json"))
    assert not list(machine.fx.rglob(".*json*"))


@pytest.mark.parametrize("filled", [True, False])
def test_a_read_only_cache_serves_what_it_has_and_says_what_it_lacks(machine, mount, filled):
    machine.toy.mkdir()
    machine.fx.mkdir()
    if filled:
        machine.warm()
    for place in (machine.toy, machine.fx):
        mount("--bind", str(place), str(place))
        subprocess.run(["mount", "-o", "remount,ro,bind", str(place)], check=True)
    report = machine.end(machine.start("warm", WIDTHS, model=filled))["report"]
    if filled:
        assert report.status == "complete"
        assert len(report.found) == KERNELS
        assert not report.built
        assert "of an earlier start" in machine.last_log, "the plan is read where it lies"
    else:
        assert report.status == "partial"
        assert "Read-only file system" in str(report)
    assert "FXWARM_CACHE_DIR" in machine.last_log


def test_a_cache_of_another_user_serves_what_it_has(context):
    if os.getuid():
        pytest.skip("only root can become somebody else")
    folder = Path(tempfile.mkdtemp())  # pytest's own folders are closed to others
    try:
        folder.chmod(0o755)
        machine = Machine(folder, context)
        machine.warm()
        subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
        theirs = folder / "theirs"
        theirs.mkdir()
        theirs.chmod(0o777)
        report = machine.run("warm_as_nobody", WIDTHS, env={"OUT": str(theirs / "out.json")})[
            "report"
        ]
        assert report.status == "complete"
        assert not report.built
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("how", ["refused", "swallowed"])
def test_where_renames_lose_the_calls_are_right_and_the_next_start_completes(machine, how):
    machine.run("warm_with_losing_renames", WIDTHS, how)
    report = machine.warm()
    assert report.status == "complete"
    machine.check_caches()


def test_where_a_rename_is_refused_for_good_a_build_says_so_at_once(machine, mount):
    """A file system of its own under DeepGEMM's ``tmp``: no rename out of it can work, and there is nothing to wait for."""
    where = Roots("A", machine.folder / "deep_gemm")
    (where.write / "tmp").mkdir(parents=True)
    mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where.write / "tmp"))
    begin = time.monotonic()
    with scratch(where) as room:
        (room / "entry").mkdir()
        (room / "entry" / "kernel.cu").write_text("// a kernel")
        with pytest.raises(OSError, match="cross-device"):
            publish(room / "entry", "kernel.k." + "0" * 32, where)
    assert time.monotonic() - begin < 30
    assert not list((where.write / "cache").iterdir())
    assert not list((where.write / "tmp").iterdir())


def test_an_upgraded_library_gets_a_plan_of_its_own(machine):
    first = machine.warm()
    second = machine.warm(env={"TOY_VERSION": "2.0", "TOY_CACHE_DIR": str(machine.folder / "toy2")})
    assert first.plan_key != second.plan_key
    assert second.status == "complete"
    assert len(second.built) == KERNELS
    assert "toy-jit 1.0, not 2.0" in machine.last_log
    assert machine.warm().built == (), "and the old one is still there"


@pytest.mark.parametrize("damage", ["zero", "cut", "garbage", "foreign"])
def test_a_damaged_entry_is_built_again_and_a_foreign_one_left_alone(machine, damage):
    machine.warm()
    path = machine.toy / "scale_3_one" / "kernel.so"
    whole = path.read_bytes()
    stranger = machine.toy / "scale_of_somebody_else"
    if damage == "foreign":
        stranger.write_text("mine")
        (machine.fx / "notes").mkdir()
    else:
        path.write_bytes({"zero": b"", "cut": whole[:4000], "garbage": b"\0" * len(whole)}[damage])
    report = machine.warm()
    assert report.status == "complete"
    assert [b.key.template for b in report.built] == ([] if damage == "foreign" else [("3", "one")])
    if damage == "foreign":
        assert stranger.read_text() == "mine"
        assert (machine.fx / "notes").is_dir()


@pytest.mark.parametrize(
    ("how", "words"), [("device", "out of memory"), ("host", "allocate memory")]
)
def test_out_of_memory_costs_one_kernel_and_the_next_start_does_that_one(machine, how, words):
    """NVIDIA/TensorRT-LLM#14851. The host's is real; the device's is what torch raises there."""
    report = machine.warm(env={"TOY_OOM": "3,other", "TOY_OOM_HOW": how})
    assert report.status == "partial"
    assert len(report.built) == KERNELS
    (failed,) = report.failed
    assert failed.key.template == ("3", "other")
    assert words in failed.error
    assert sum(not x.error for x in report.loaded) == KERNELS - 1
    assert not list(machine.fx.rglob("receipt.json"))
    report = machine.warm()
    assert report.status == "complete"
    assert report.built == ()
    assert list(machine.fx.rglob("receipt.json"))


def test_a_compile_that_hangs_is_given_up_by_name(machine):
    compiler = machine.folder / "cc"
    compiler.write_text("#!/bin/sh\nexec sleep 20\n")
    compiler.chmod(0o755)
    begin = time.monotonic()
    process = machine.start(
        "warm", (3,), env={"TOY_CC": str(compiler)}, model=False, build_timeout=0.4
    )
    report = machine.end(process)["report"]
    assert time.monotonic() - begin < 15
    assert report.status == "partial"
    assert not report.loaded
    assert {f.key.template[1] for f in report.failed} == {"one", "mult16", "other"}
    assert "fxwarm.build_timeout (0.4 s)" in report.failed[0].error


@pytest.mark.parametrize("phase", ["build", "load"])
def test_ctrl_c_leaves_everything_usable(machine, phase):
    env = {"TOY_BUILD_SECONDS": "0.1"} if phase == "build" else {"TOY_LOAD_SECONDS": "0.2"}
    if phase == "load":
        machine.warm()
    process = machine.start("interrupted", WIDTHS, env=env)
    wait_for(process.out.with_suffix(".ready"))
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGINT)
    done = machine.end(process)
    assert done["stopped"]
    assert done["report"].status == "complete"
    assert done["residents"] == KERNELS
    machine.check_caches()
    assert machine.warm().built == ()


def test_a_forked_child_is_as_warm_as_its_parent(machine):
    done = machine.run("fork_when_warm", WIDTHS)
    assert done["report"].status == "complete"
    assert done["late"] == []
    assert done["report"].built == ()
    assert done["report"].loaded == ()


def test_a_child_forked_in_the_middle_of_a_warmup_finishes_it(machine):
    done = machine.run("fork_while_building", WIDTHS, env={"TOY_BUILD_SECONDS": "0.1"})
    assert done["report"].status == "complete"
    assert done["late"] == []
    assert len(done["report"].loaded) == KERNELS


def test_a_spawned_child_builds_nothing(machine):
    machine.warm()
    machine.context = multiprocessing.get_context("spawn")
    report = machine.warm()
    assert report.status == "complete"
    assert report.built == ()
    assert len(report.loaded) == KERNELS


def nested(depth: int) -> str:
    return '{"shapes":' * depth + "{}" + "}" * depth


def crafted(plan: str) -> dict[str, str]:
    data = json.loads(plan)

    def with_(**changes) -> str:
        return json.dumps({**data, **changes})

    key = data["planned"][0]["key"]
    return {
        "huge": "[" + "0," * (36 << 20) + "0]",
        "deep": nested(100_000),
        "array of arrays": "[" * 500_000,
        "wrong types": with_(planned={"a": 1}),
        "number as name": with_(target=7),
        "unknown field": with_(run="import os"),
        "traversal": with_(
            planned=[{"key": key, "source": {"entry": "../../../evil", "code": "x"}}]
        ),
        "absolute": with_(planned=[{"key": key, "source": {"entry": "/evil", "code": "x"}}]),
        "foreign family": with_(planned=[{"key": {**key, "family": "os"}}]),
        "module as kernel": with_(
            planned=[
                {"key": {**key, "family": "tilelang", "kernel": "run", "tag": "fault_canary:run"}}
            ]
        ),
        "not text": "\udcff" * 10,
        "infinite": with_(schema=1e400),
    }


NAMES = tuple(crafted('{"planned":[{"key":{}}]}'))


@pytest.mark.parametrize("file", ["plan", "learned"])
@pytest.mark.parametrize("name", NAMES)
def test_a_crafted_plan_does_no_harm(machine, name, file):
    first = machine.warm((3,))
    folder = machine.fx / first.plan_key
    text = crafted((folder / "plan.json").read_text())[name]
    (folder / f"{file}.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    (machine.folder / "fault_canary.py").write_text(
        f"open({str(machine.folder / 'evil')!r}, 'w').write('x')"
    )
    before = {p for p in machine.folder.rglob("*") if not p.name.startswith("out")}
    report = machine.warm((3,), env={"IMPORT_FROM": str(machine.folder)})
    made = {p for p in machine.folder.rglob("*") if not p.name.startswith("out")} - before
    assert all(machine.fx in p.parents or machine.toy in p.parents for p in made), made
    assert not (machine.folder / "evil").exists()
    assert sum(not x.error for x in report.loaded) == 3 or name in (
        "foreign family",
        "module as kernel",
    )


def test_a_crafted_receipt_removes_no_file_of_yours(machine):
    first = machine.warm((3,))
    path = machine.fx / first.plan_key / "receipt.json"
    mine = machine.folder / "thesis.txt"
    mine.write_text("short")
    data = json.loads(path.read_text())
    data["entries"] = [{"path": str(mine), "bytes": 10**6, "sha256": ""}, *data["entries"]]
    path.write_text(json.dumps(data))
    assert machine.warm((3,)).status == "complete"
    assert mine.read_text() == "short"


@pytest.mark.parametrize("entry", ["../x", "/x", "a/b", "..", ".", "", "a\0b"])
def test_a_source_whose_entry_is_a_path_is_refused(entry):
    key = CompileKey("deep_gemm", "k")
    with pytest.raises(ValueError, match="is no name of a cache entry"):
        Planned(key, None, Source(entry, "code"))


def test_a_plan_from_a_file_does_not_choose_what_is_imported():
    from fxwarm.exc import LibraryError
    from fxwarm.families.tilelang import TileLang

    strange = Planned(CompileKey("tilelang", "run", (), "fault_canary:run"))
    for step in (TileLang().missing, lambda *a: list(TileLang().load(*a))):
        with pytest.raises(LibraryError, match="was not declared in this process"):
            step([strange], Target("cpu", device="cpu"))


def test_a_folder_that_others_can_write_to_is_warned_about_and_their_files_are_refused(machine):
    machine.warm((3,))
    machine.fx.chmod(0o777)
    (path,) = machine.fx.rglob("plan.json")
    path.chmod(0o666)
    assert machine.warm((3,)).status == "complete"
    assert "anybody may write" in machine.last_log
    assert "chmod o-w" in machine.last_log
    if os.getuid() == 0:
        path.chmod(0o644)
        os.chown(path, 65534, 65534)
        assert store.read(path, WarmPlan) is None


def test_what_a_receipt_stands_on_is_checked():
    target = Target("cpu", device="cpu")
    assert (
        receipts.keep(WarmPlan(target), WarmReport("", target), fault_child.Options()).entries == ()
    )
