"""Receipts: believed only when whole; then nothing is asked or built, and every kernel is loaded all the same."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec
import pytest
import torch

from fxwarm import api, options, receipts, roots, store
from fxwarm.records import CompileKey, Library, Target, Tuned, WarmPlan, WarmReport
from fxwarm.warmup import Warmup
from passes.records import Dim, KernelCall, ShapeSet, Site, Symbol, TensorSpec
from tests import conftest, toy_family
from tests.cold import forget
from tests.toy_family import Toy

CPU = Target.named("cpu")
CASES = {param.id: param.values[0] for param in conftest.cases("cache")}


pytestmark = pytest.mark.usefixtures("toy")


def shapes(*calls: tuple[int, int, int]) -> ShapeSet:
    """Return calls of (width, fewest rows, most rows): each class of rows in the range is a kernel."""
    out = []
    for width, low, high in calls:
        rows = Dim("s0", low, high, ((low, high, 1),)) if high > low else Dim.static(low)
        x = TensorSpec("float32", (rows, Dim.static(width)))
        w = TensorSpec("float32", (Dim.static(width),))
        symbols = () if rows.is_static else (Symbol("s0", low, high),)
        out.append(KernelCall("toy", "scale", (("x", x), ("w", w)), symbols=symbols))
    return ShapeSet(calls=tuple(out), sites=tuple(Site(1, "") for _ in out))


FOUR = shapes((8, 1, 100), (16, 1, 1))
FIVE = shapes((8, 1, 100), (16, 2, 100))
SIX = shapes((8, 1, 100), (16, 1, 100))
EIGHT = shapes((8, 1, 100), (16, 1, 100), (32, 2, 100))


def start(wanted: ShapeSet = SIX, **given: object) -> WarmReport:
    """Warm in what stands for a fresh process."""
    forget()
    return Warmup(wanted, options.resolve(given), device=torch.device("cpu"), target=CPU).finish()


def counts(report: WarmReport) -> tuple[int, int]:
    """(built, loaded)"""
    return sum(not b.error for b in report.built), sum(not x.error for x in report.loaded)


def receipt_of(report: WarmReport) -> Path:
    return store.path_of(store.root(os.environ["FXWARM_CACHE_DIR"]), report.plan_key, "receipt")


def kernel(name: str) -> Path:
    return toy_family.cache_dir() / name / "kernel.so"


def put(path: Path, data: bytes) -> None:
    """Replace a file by another: a loaded kernel's own pages must stay."""
    new = path.with_suffix(".new")
    new.write_bytes(data)
    new.replace(path)


@pytest.fixture
def asked(monkeypatch):
    """Count how often the family is asked for keys."""
    times: list[int] = []
    original = Toy.keys

    def keys(self, *args):
        times.append(1)
        return original(self, *args)

    monkeypatch.setattr(Toy, "keys", keys)
    return times


def test_the_next_start_asks_and_builds_nothing_and_loads_everything(asked):
    assert counts(start()) == (6, 6) and len(asked) == 1
    report = start()
    assert counts(report) == (0, 6) and len(asked) == 1
    assert report.status == "complete" and len(report.found) == 6


def test_a_plan_by_hand_asks_nothing_where_a_receipt_holds(asked, monkeypatch):
    monkeypatch.setattr(Target, "current", lambda device=None: CPU)
    assert not receipts.knows(SIX, options.resolve({}))
    made = api.plan(SIX)
    api.warm(made)
    assert len(asked) == 1 and receipts.knows(SIX, options.resolve({}))
    forget()
    assert api.plan(SIX) == made and len(asked) == 1
    assert not receipts.knows(FIVE, options.resolve({}))
    assert len(api.plan(FIVE)) and len(asked) == 2
    assert len(api.plan(SIX, CPU)) == 6 and len(asked) == 3, "a named target is always planned for"


def test_a_believed_receipt_is_not_written_again():
    path = receipt_of(start())
    before = path.stat().st_mtime_ns
    start()
    assert path.stat().st_mtime_ns == before


def test_a_receipt_holds_sizes_and_hashes_and_a_whole_check_compares_the_contents():
    report = start()
    assert len(report.entries) == 6
    entry = report.entries[0]
    assert receipts.check_entry(entry, whole=True) == ""
    data = bytearray(Path(entry.path).read_bytes())
    data[-1] ^= 1
    put(Path(entry.path), bytes(data))
    assert receipts.check_entry(entry) == "", "a start looks at sizes only"
    assert "has other contents" in receipts.check_entry(entry, whole=True)


@pytest.mark.parametrize(
    ("spoil", "asks", "why"),
    [
        (lambda path: path.write_text(path.read_text()[:-30]), 2, "ignoring"),
        (lambda path: path.write_text('{"kind":"another program"}'), 2, "ignoring"),
        (
            lambda path: path.write_text(path.read_text().replace('"schema":1', '"schema":99')),
            2,
            "ignoring",
        ),
        (lambda path: path.write_bytes(b"\x80\x04\x95pickle"), 2, "ignoring"),
        (lambda path: path.unlink(), 2, ""),
        (lambda path: path.with_name("plan.json").unlink(), 2, "has no plan beside it"),
        (
            lambda path: path.write_text(path.read_text().replace(path.parent.name, "0" * 32)),
            2,
            "it is not used",
        ),
    ],
    ids=["truncated", "foreign", "another schema", "pickle", "gone", "plan gone", "of another key"],
)
def test_a_receipt_that_cannot_be_believed_costs_a_question_and_no_build(
    spoil, asks, why, asked, caplog
):
    path = receipt_of(start())
    spoil(path)
    with caplog.at_level(logging.INFO, logger="fxwarm"):
        assert counts(start()) == (0, 6)
    assert len(asked) == asks and why in caplog.text
    assert store.read(path, WarmReport) is not None, "and it is written again"


def test_an_entry_that_vanished_is_built_again_and_nothing_else(caplog):
    start()
    kernel("scale_8_one").unlink()
    report = start()
    assert counts(report) == (1, 6) and "scale_8_one/kernel.so: No such file" in caplog.text
    assert "scale_8_one" in str(report.built[0].key).replace("<8, one>", "_8_one")


def test_an_entry_that_somebody_rebuilt_is_kept(caplog):
    start()
    put(kernel("scale_8_one"), kernel("scale_8_one").read_bytes() + b"\0")
    assert counts(start()) == (0, 6) and "is stale" in caplog.text
    caplog.clear()
    assert counts(start()) == (0, 6) and "is stale" not in caplog.text


@pytest.mark.parametrize("why", ["build", "gap"])
def test_no_receipt_before_everything_is_warm(why, monkeypatch):
    if why == "build":
        monkeypatch.setenv("TOY_CC", "false")
        report = start()
    else:
        report = start(max_keys=4)
        assert counts(report) == (4, 4)
    assert report.status == "partial" and not receipt_of(report).exists()


def test_a_plan_that_was_cut_is_not_what_a_later_start_finds():
    start(max_keys=4)
    assert counts(start()) == (2, 6)


def test_nothing_that_is_written_is_a_pickle():
    """Every file of ours is JSON; ``marshal`` and ``pickle`` are imported nowhere."""
    start()
    files = [path for path in Path(os.environ["FXWARM_CACHE_DIR"]).rglob("*") if path.is_file()]
    assert sorted(p.name for p in files) == ["plan.json", "receipt.json", "receipt.lock"]
    for path in files:
        if path.suffix == ".json":
            msgspec.json.decode(path.read_bytes())
    source = Path(receipts.__file__).parent
    for path in source.rglob("*.py"):
        text = path.read_text()
        for name in (
            "import pickle",
            "from pickle",
            "import marshal",
            "import shelve",
            "import dill",
        ):
            assert name not in text, path


def test_what_two_processes_learn_at_once_is_united():
    """Each reads what is known, adds its own and writes: without the lock one of them would be lost."""
    plan = store.read(receipt_of(start()).with_name("plan.json"), WarmPlan)
    found = [
        msgspec.structs.replace(p, key=msgspec.structs.replace(p.key, template=(str(i),)))
        for i, p in enumerate(plan.planned * 4)
    ]
    threads = [
        threading.Thread(target=receipts.learn, args=(plan, [p], options.resolve())) for p in found
    ]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert set(receipts.with_learned(plan, options.resolve()).keys) >= {p.key for p in found}


def test_the_target_is_what_torch_says_of_the_device(monkeypatch):
    """A MIG slice has its own name and SM count; two slices of one size share their kernels."""
    from types import SimpleNamespace

    def props(name, sms):
        return lambda device: SimpleNamespace(
            name=name,
            major=9,
            minor=0,
            multi_processor_count=sms,
            shared_memory_per_block_optin=232448,
        )

    keys = []
    for name, sms in (
        ("NVIDIA H200", 132),
        ("NVIDIA H200 MIG 1g.18gb", 16),
        ("NVIDIA H200 MIG 3g.71gb", 60),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_properties", props(name, sms))
        target = Target.current("cuda:0")
        keys.append(receipts.key_of(SIX, target, (), ""))
    assert "mig" in target.name and len(set(keys)) == 3


# The cases of public bug reports.


def case(name: str):
    """Mark a test with the case it answers; it needs the file of cases, which a user's clone lacks."""
    return pytest.mark.skipif(name not in CASES and bool(CASES), reason=f"no case {name}")


@case("A20")
def test_A20_a_stored_tactic_never_spares_the_build(monkeypatch):
    monkeypatch.setattr(
        Toy,
        "tune",
        lambda self, planned, bind: [Tuned(p.key, found=True) for p in planned],
        raising=False,
    )
    report = start(shapes((8, 1, 100)))
    assert (
        counts(report) == (3, 3) and len(report.tuned) == 3 and all(t.found for t in report.tuned)
    )
    assert report.status == "complete" and all(
        kernel(f"scale_8_{kind}").is_file() for kind in toy_family.CLASSES
    )
    toy_family.events.clear()
    for rows in (1, 16, 17):
        toy_family.scale(torch.ones(rows, 8), torch.ones(8))
    assert toy_family.events == []


@case("B11")
@pytest.mark.parametrize("step", ["build", "load"])
def test_B11_running_out_of_memory_at_one_key_leaves_the_others(step, monkeypatch, caplog):
    name = {"build": "compile_kernel", "load": "get_kernel"}[step]
    original, faults = getattr(toy_family, name), []

    def once(kernel_name: str):
        if kernel_name == "scale_8_other" and not faults:
            faults.append(1)
            raise MemoryError("out of memory")
        return original(kernel_name)

    monkeypatch.setattr(toy_family, name, once)
    report = start(FIVE)
    built, loaded = counts(report)
    assert built == (4 if step == "build" else 5) and loaded == 4
    (failed,) = report.failed
    assert failed.key.template == ("8", "other") and failed.error == "MemoryError: out of memory"
    assert (
        report.status == "partial" and "scale<8, other>: MemoryError: out of memory" in caplog.text
    )
    assert not receipt_of(report).exists()
    assert toy_family.scale(torch.ones(3, 8), torch.full((8,), 2.0)).sum() == 48
    if step == "build":  # the call above built it
        (toy_family.cache_dir() / "scale_8_other" / "kernel.so").unlink()
    assert counts(start(FIVE)) == (int(step == "build"), 5)


STOPPED = """
import os
from tests import toy_family
from tests.fxwarm import test_receipts as t
from fxwarm import family
family.register(toy_family.Toy)
original, done = toy_family.compile_kernel, []
def compile_kernel(name):
    if len(done) == 3:
        os._exit(9)
    done.append(name)
    return original(name)
toy_family.compile_kernel = compile_kernel
t.start()
"""


@case("B12")
def test_B12_a_start_that_was_stopped_is_gone_on_with(caplog):
    done = subprocess.run(
        [sys.executable, "-c", STOPPED], cwd=Path(__file__).parents[2], timeout=120
    )
    assert done.returncode == 9
    with caplog.at_level(logging.INFO, logger="fxwarm"):
        assert counts(start()) == (3, 6)
    lines = [r.message for r in caplog.records if "building toy" in r.message]
    assert [line.split(" ")[3] for line in lines[:3]] == ["1/3", "2/3", "3/3"]
    assert all(line.endswith(" s") for line in lines[:3])
    assert "complete" not in " ".join(r.message for r in caplog.records[:-1])


@case("D5")
@pytest.mark.parametrize("fault", [errno.EBUSY, errno.ESTALE, errno.ENOENT])
def test_D5_faults_of_a_network_disk_are_misses(fault, monkeypatch, caplog):
    start()
    put(kernel("scale_8_one"), b"cut")

    def fail(*args, **kwargs):
        raise OSError(fault, os.strerror(fault))

    with monkeypatch.context() as patch:
        if fault == errno.EBUSY:
            patch.setattr(Path, "unlink", fail)
        elif fault == errno.ESTALE:
            patch.setattr(Path, "read_bytes", fail)
        else:
            patch.setattr(receipts, "_entry", fail)
        report = start()
    assert len(report.plan_key) == 32 and counts(report)[1] + len(report.failed) == 6, (
        "nothing ended the warmup"
    )


@case("D5")
def test_D5_a_root_on_a_network_disk_is_named_once(tmp_path, monkeypatch, caplog):
    """Whether a setting chose it, Inductor's cache lies there, or a library's default below HOME does."""
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\nserver:/x {tmp_path}/net nfs4 rw 0 0\n")
    original = roots.warn_if_remote
    monkeypatch.setattr(roots, "warn_if_remote", lambda folder: original(folder, str(mounts)))
    monkeypatch.setattr(roots, "_told", set())
    ours, theirs = tmp_path / "net" / "inductor", tmp_path / "net" / ".deep_gemm"
    theirs.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(theirs.parent))
    monkeypatch.delenv("DG_JIT_CACHE_DIR")
    for _ in range(2):
        store._root.cache_clear()
        store.root(str(ours))
    for folder in (ours, theirs):
        line = f"{folder} is on a network disk (nfs4); a local folder is faster and safer"
        assert caplog.text.count(line) == 1
    assert not roots.warn_if_remote(tmp_path / "local")
    caplog.clear()
    roots.apply(str(ours), {})
    assert "is on a network disk" not in caplog.text, "it was said"


@case("D5")
def test_D5_the_default_root_is_inductors_which_is_local(monkeypatch):
    assert store._beside_inductor() == os.path.join(os.environ["TORCHINDUCTOR_CACHE_DIR"], "fxwarm")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert Path(store._beside_inductor()).is_relative_to(tempfile.gettempdir())


@case("D7")
def test_D7_the_order_of_kernels_changes_no_key():
    a, b = (8, 1, 1), (16, 1, 1)
    reports = [start(shapes(*order)) for order in ((a, b), (b, a), (b,))]
    assert [counts(r) for r in reports] == [(2, 2), (0, 2), (0, 1)]
    entries = [{e.path: e.sha256 for e in r.entries} for r in reports]
    assert entries[0] == entries[1] and entries[2].items() <= entries[0].items()
    assert len(list(Path(os.environ["FXWARM_CACHE_DIR"]).glob("*/receipt.json"))) == 2
    assert reports[0].plan_key == reports[1].plan_key


@case("D8")
def test_D8_times_of_files_mean_nothing(tmp_path):
    from fxwarm.families.deep_gemm import library

    start()
    include = tmp_path / "lib" / "include" / "deep_gemm"
    include.mkdir(parents=True)
    (include / "a.cuh").write_text("// header")
    before = library._headers(tmp_path / "lib")
    for path in [
        *toy_family.cache_dir().rglob("*"),
        include / "a.cuh",
        *Path(os.environ["FXWARM_CACHE_DIR"]).rglob("*"),
    ]:
        os.utime(path, (1, 1))
    library._headers.cache_clear()
    assert library._headers(tmp_path / "lib") == before
    assert library._headers(tmp_path / "lib") == before and library._headers.cache_info().hits == 1
    assert counts(start()) == (0, 6)


@case("D9")
def test_D9_a_truncated_entry_is_built_again_before_it_is_used(caplog):
    assert counts(start(FOUR)) == (4, 4)
    path = kernel("scale_8_mult16")
    put(path, path.read_bytes()[: path.stat().st_size // 2])
    with caplog.at_level(logging.WARNING, logger="fxwarm"):
        report = start(FOUR)
    assert counts(report) == (1, 4) and report.built[0].key.template == ("8", "mult16")
    assert [r.message.count("scale_8_mult16") for r in caplog.records] == [1]
    assert report.status == "complete"


@case("D12")
@pytest.mark.parametrize(
    ("variant", "right"),
    [
        ("exact", (0, 6)),
        ("raised", (2, 8)),
        ("missing", (0, 6)),
        ("damaged", (0, 6)),
        ("version", (6, 6)),
    ],
)
def test_D12_a_restored_cache(variant, right, monkeypatch, asked):
    path = receipt_of(start())
    if variant == "missing":
        path.unlink()
    elif variant == "damaged":
        path.write_text("{")
    elif variant == "version":
        other_version(monkeypatch, "2.0")
    assert counts(start(EIGHT if variant == "raised" else SIX)) == right
    assert len(asked) == (1 if variant == "exact" else 2), "no sweep where the receipt fits"
    receipt = store.read(receipt_of(start()), WarmReport)
    assert len(receipt.entries) == 6 and receipt.libraries[0].distribution == "toy-jit"


def other_version(monkeypatch, version: str, fingerprint: str = "") -> None:
    """Install another toy, which keeps its kernels in a folder of its own, as the libraries do."""
    monkeypatch.setattr(
        Toy,
        "library",
        lambda self, wanted: Library("toy-jit", version, True, "toy", fingerprint=fingerprint),
    )
    folder = Path(os.environ["TOY_CACHE_DIR"]) / f"{version}{fingerprint}"
    monkeypatch.setattr(toy_family, "cache_dir", lambda: folder)


@case("D13")
def test_D13_a_changed_header_makes_receipts_stale_and_undoing_it_makes_them_good(
    tmp_path, monkeypatch, caplog
):
    from fxwarm.families.deep_gemm import library

    header = tmp_path / "lib" / "include" / "deep_gemm" / "a.cuh"
    header.parent.mkdir(parents=True)

    def with_header(text: str) -> None:
        header.write_text(text)
        library._headers.cache_clear()
        other_version(monkeypatch, "1.0", library._headers(tmp_path / "lib"))

    with_header("// a")
    assert counts(start()) == (6, 6)
    with_header("// b")
    with caplog.at_level(logging.INFO, logger="fxwarm"):
        assert counts(start()) == (6, 6)
    assert "the fingerprint of toy-jit 1.0 changed" in caplog.text
    with_header("// a")
    assert counts(start()) == (0, 6)


@case("D14")
def test_D14_a_cache_of_another_version_is_not_used_and_one_line_names_both(monkeypatch, caplog):
    other_version(monkeypatch, "0.6.9")
    start()
    other_version(monkeypatch, "0.6.11")
    with caplog.at_level(logging.INFO, logger="fxwarm"):
        assert counts(start()) == (6, 6)
    assert sum("toy-jit 0.6.9, not 0.6.11" in r.message for r in caplog.records) == 1


@case("D15")
def test_D15_the_architecture_is_part_of_the_key_and_an_unknown_one_is_a_gap():
    h200, other = Target.named("h200"), Target("rubin", arch="sm_107a")
    assert receipts.key_of(SIX, h200, (), "") != receipts.key_of(SIX, other, (), "")
    from fxwarm.families.flashinfer import cache

    assert cache._archs("sm_90a") != cache._archs("sm_107a")
    assert cache.find_module("sampling", "sm_107a") is None, (
        "a prebuilt of 90a is no module for 107"
    )


@case("D17")
def test_D17_tactics_of_another_card_are_never_read_nor_overwritten(tmp_path, monkeypatch):
    """Stamps inside a file: ``families/flashinfer/test_stamps.py``, with the library's own reader."""
    from fxwarm.families.flashinfer import cache
    from fxwarm.records import Planned

    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    start()
    planned = [Planned(CompileKey("flashinfer", "bmm_fp8", ("64",)))]
    h100, h200 = (
        cache.tactics_path(planned, "sm_90a", card) for card in ("NVIDIA H100", "NVIDIA H200")
    )
    h100.parent.mkdir(parents=True)
    h100.write_text('{"_metadata": {"gpu": "H100"}, "entry": 1}')
    assert h100 != h200 and cache.tactics_files(h200) == []
    assert cache.read_tactics([h100]) == {"entry"}, "metadata is no entry"
    monkeypatch.setattr(cache, "installed_version", lambda: "0.6.99")
    assert cache.tactics_path(planned, "sm_90a", "NVIDIA H100") != h100, (
        "another version has another file"
    )
    assert counts(start()) == (0, 6), "receipts of kernels that need no tactic stay valid"


@case("D2")
def test_D2_the_loser_of_a_race_waits_until_it_sees_the_winners_entry(tmp_path, monkeypatch):
    from fxwarm.families.deep_gemm import cache

    where = cache.Roots("A", tmp_path)
    winner = cache.locate(where, "kernel.x.1")
    winner.mkdir(parents=True)
    (winner / cache.CODE).write_text("")
    built = tmp_path / "tmp" / "mine"
    built.mkdir(parents=True)
    (built / cache.CODE).write_text("")
    seen, original = [], cache.is_complete

    def lagging(folder, generation):
        seen.append(folder)
        return len(seen) > 4

    monkeypatch.setattr(cache, "is_complete", lagging)
    monkeypatch.setattr(Path, "exists", lambda self, **k: self != winner)
    monkeypatch.setattr(cache, "SEEN_EVERY", 0.01, raising=False)
    assert cache.publish(built, "kernel.x.1", where) == winner
    assert not built.is_dir(), "its private copy is gone"
    assert original is not lagging


@case("D19")
def test_D19_a_read_only_cache_is_used_and_what_is_new_goes_elsewhere(
    tmp_path, monkeypatch, caplog
):
    from fxwarm.families.deep_gemm import cache

    monkeypatch.setattr(cache, "is_complete", lambda folder, generation: folder.is_dir())
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path / "private"))
    shared = cache.Roots("A", tmp_path / "shared")
    for i in range(6):
        (shared.write / "cache" / f"kernel.gemm.{i:032x}").mkdir(parents=True)

    def read_only(**kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(cache.tempfile, "TemporaryFile", read_only)
    usable = cache.writable(shared)
    assert usable.write != shared.write and len(cache.entries(usable)) == 6
    (usable.write / "cache" / f"kernel.gemm.{7:032x}").mkdir()
    assert len(cache.entries(usable)) == 7 and len(cache.entries(shared)) == 6
    assert sum("cannot be written" in r.message for r in caplog.records) == 1


@case("D20")
def test_D20_with_a_read_only_home_kernels_are_kept_in_a_temporary_place(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(roots.os, "access", lambda path, mode: False)
    monkeypatch.setattr(roots.tempfile, "gettempdir", lambda: str(tmp_path))
    for module in ("deep_gemm", "flashinfer", "tilelang"):  # as before any is imported
        monkeypatch.delitem(roots.sys.modules, module, raising=False)
    environ = {"HOME": str(tmp_path / "home")}
    (tmp_path / "home" / ".deep_gemm").mkdir(parents=True)
    moved = roots.apply(environ=environ)
    assert "DG_JIT_CACHE_DIR" not in moved, "what is there can still be used"
    assert all(folder.is_relative_to(tmp_path) for folder in moved.values()) and len(moved) == 3
    assert caplog.text.count("may be gone at the next start") == 1


HOMELESS = """
import os
os.environ.pop("HOME", None)
import fxwarm
from fxwarm.families.deep_gemm import cache as deep_gemm
from fxwarm.families.flashinfer import cache as flashinfer
from fxwarm import store
from pathlib import Path
print(deep_gemm.roots("A").write)
print(flashinfer.block_kernel("x"))
print(os.environ["FLASHINFER_WORKSPACE_BASE"])
print(os.environ["TILELANG_CACHE_DIR"])
print(store.root(os.environ.get("FXWARM_CACHE_DIR", "")))
"""


@case("D21")
@pytest.mark.parametrize("root", ["", "one"])
def test_D21_one_setting_moves_all_libraries_and_no_home_is_no_error(root, tmp_path):
    environ = {
        k: v for k, v in os.environ.items() if not k.endswith(("_CACHE_DIR", "WORKSPACE_BASE"))
    }
    environ |= {
        "TMPDIR": str(tmp_path),
        "FXWARM_LOG": "",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    if root:
        environ["FXWARM_CACHE_ROOT"] = str(tmp_path / root)
    done = subprocess.run(
        [sys.executable, "-c", HOMELESS], env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    *libraries, ours = map(Path, done.stdout.splitlines())
    base = tmp_path / (root or f"fxwarm-{os.getuid()}")
    assert all(path.is_relative_to(base) for path in libraries), libraries
    assert ours.is_relative_to(tmp_path)
    if not root:
        assert "HOME is unset, so kernels go to" in done.stderr and str(base) in done.stderr


@case("D21")
def test_D21_a_setting_that_comes_too_late_is_said(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "tilelang", object())
    environ = {"HOME": "/", "DG_JIT_CACHE_DIR": "/mine"}
    moved = roots.apply("/somewhere", environ)
    assert "tilelang is imported already" in caplog.text and "TILELANG_CACHE_DIR" not in moved
    assert environ["DG_JIT_CACHE_DIR"] == "/mine" and roots.folders(environ)[
        "FXWARM_CACHE_DIR"
    ] == Path("/somewhere/fxwarm")


def test_every_case_of_this_kind_has_a_test():
    if not CASES or "A20" not in CASES:
        pytest.skip("cases.json lies beside the checkout only in CI")
    tests = " ".join(name for name in globals() if name.startswith("test_"))
    assert [name for name in CASES if f"test_{name}_" not in tests] == []


def test_a_plan_of_a_receipt_shows_the_gaps_of_the_graph_at_hand():
    start()
    from passes.records import Gap

    open_ = msgspec.structs.replace(SIX, gaps=(Gap("x::y", "no family claims this JIT op"),))
    report = start(open_)
    assert (
        counts(report) == (0, 6)
        and report.status == "partial"
        and [g.op for g in report.gaps] == ["x::y"]
    )
    assert start(SIX).status == "complete"
    assert isinstance(store.read(receipt_of(report).with_name("plan.json"), WarmPlan), WarmPlan)
