"""The command line does what its help says, and its exit status says how it went."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fxwarm
from fxwarm import caches
from fxwarm.cli import DONE, FAILED, INCOMPLETE, main
from fxwarm.records import WarmPlan, WarmReport
from passes.records import ShapeSet
from tests import toy_family
from tests.toy_family import Toy

MODEL = """
import torch
import tests.toy_family

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x):
        return torch.ops.toy.scale(x, self.w).sin()

def build():
    with torch.device("meta"):
        return Model(), (torch.ones(6, 8),)

def wrong():
    return 3

def broken():
    raise RuntimeError("no such checkpoint")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a model, caches of its own, and the toy family."""
    for name in ("TOY_CACHE_DIR", "FXWARM_CACHE_DIR", "DG_JIT_CACHE_DIR", "TILELANG_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "TORCHINDUCTOR_CACHE_DIR", "TRTLLM_DG_CACHE_DIR"):  # fmt: skip
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cli_model.py").write_text(MODEL)
    fxwarm.register(Toy)
    yield tmp_path
    fxwarm.unregister("toy")
    sys.modules.pop("cli_model", None)


@pytest.fixture
def shapes(folder, capsys):
    assert main(["trace", "cli_model:build", "--max-size", "64", "-o", "shapes.json"]) == DONE
    capsys.readouterr()
    return folder / "shapes.json"


@pytest.fixture
def plan(shapes, capsys):
    assert main(["plan", str(shapes), "--target", "cpu", "-o", "plan.json"]) == DONE
    capsys.readouterr()
    return shapes.with_name("plan.json")


def test_from_a_function_to_warm_kernels(plan, capsys):
    assert len(ShapeSet.from_json(Path("shapes.json").read_text())) == 1
    made = WarmPlan.from_json(plan.read_text())
    assert len(made) == 3
    assert main(["verify", "plan.json"]) == INCOMPLETE
    assert "0 of 3 kernels" in capsys.readouterr().out
    assert main(["warm", "plan.json", "-o", "report.json"]) == DONE
    report = WarmReport.from_json(Path("report.json").read_text())
    assert len(report.built) == 3
    assert report.status == "complete"
    capsys.readouterr()
    assert main(["verify", "plan.json", "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "warm": True,
        "planned": 3,
        "missing": [],
        "changed": [],
        "libraries": [],
        "gaps": [],
    }


def test_verify_compares_the_contents_with_the_receipt(plan, capsys):
    """A start looks at sizes only: one changed byte is found here."""
    assert main(["warm", "plan.json"]) == DONE
    entry = next(toy_family.cache_dir().glob("scale_*/kernel.so"))
    data = bytearray(entry.read_bytes())
    data[-1] ^= 1
    entry.with_suffix(".new").write_bytes(data)
    entry.with_suffix(".new").replace(entry)  # a loaded kernel's own pages must stay
    capsys.readouterr()
    assert main(["verify", "plan.json"]) == INCOMPLETE
    out = capsys.readouterr().out
    assert f"{entry.parent.name}/kernel.so has other contents; remove it and run fxwarm warm" in out
    assert "3 of 3 kernels are on this machine's disk" in out


def test_show_prints_any_of_our_files_and_draws_it(plan, capsys):
    for name, says in (("shapes.json", "1 kernel call of toy"), ("plan.json", "3 kernels for cpu")):
        assert main(["show", name]) == DONE
        out = capsys.readouterr().out
        assert says in out
        assert max(map(len, out.splitlines())) <= 120
        assert main(["show", name, "--json"]) == DONE
        assert json.loads(capsys.readouterr().out) == json.loads(Path(name).read_text())
    pytest.importorskip("matplotlib")
    assert main(["show", "plan.json", "--svg", "plan.svg"]) == DONE
    assert Path("plan.svg").read_text().startswith("<svg")


def test_diff_says_what_changed_and_its_status_whether_anything_did(plan, capsys):
    assert main(["trace", "cli_model:build", "--max-size", "8", "-o", "small.json"]) == DONE
    assert main(["plan", "small.json", "--target", "cpu", "-o", "small_plan.json"]) == DONE
    capsys.readouterr()
    assert main(["diff", "shapes.json", "shapes.json"]) == DONE
    assert main(["diff", "plan.json", "plan.json", "--json"]) == DONE
    capsys.readouterr()
    assert main(["diff", "small_plan.json", "plan.json", "--json"]) == INCOMPLETE
    found = json.loads(capsys.readouterr().out)
    assert [p["key"]["template"] for p in found["added"]["planned"]] == [["8", "mult16"]]
    assert not found["removed"]
    assert main(["diff", "small.json", "shapes.json"]) == INCOMPLETE
    assert "1..64" in capsys.readouterr().out
    assert main(["diff", "shapes.json", "plan.json"]) == FAILED
    assert "give two files of one kind" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["trace", "no_such_module:f"], "neither a folder with a config.json nor an importable"),
        (["trace", "cli_model:buld"], "did you mean 'build'"),
        (["trace", "cli_model:wrong"], "must return (model, args)"),
        (["trace", "cli_model:broken"], "raised RuntimeError: no such checkpoint"),
        (["trace", "cli_model:build", "--fp8"], "are for configurations"),
        (["trace", "."], "give a folder with a config.json"),
        (["show", "cli_model.py"], "truncated or not ours"),
        (["show", "absent.json"], "absent.json"),
        (["plan", "absent.json"], "absent.json"),
        (["clean", "--yes"], "--yes needs at least one --root"),
    ],
)
def test_what_cannot_run_says_why_and_exits_with_two(folder, capsys, argv, says):
    assert main(argv) == FAILED
    assert says in capsys.readouterr().err


def test_a_library_that_nobody_knows_is_named(shapes, capsys):
    assert main(["plan", str(shapes), "--library", "deepgemm==1"]) == FAILED
    assert "no family plans for 'deepgemm'" in capsys.readouterr().err
    assert main(["plan", str(shapes), "--library", "deepgemm"]) == FAILED
    assert "NAME==VERSION" in capsys.readouterr().err


CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "moe_intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "num_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def test_a_hugging_face_configuration_is_traced_without_weights(folder, capsys):
    pytest.importorskip("transformers")
    Path("config.json").write_text(json.dumps({**CONFIG, "quantization_config": FP8}))
    assert main(["trace", ".", "--layers", "2", "--json"]) == DONE
    shapes = ShapeSet.from_json(capsys.readouterr().out)
    assert [(c.op, tuple(int(d) for d in c["b"].dims)) for c in shapes.calls] == [
        ("fp8_gemm_nt", (1024, 256)),
        ("fp8_gemm_nt", (256, 512)),
        ("m_grouped_fp8_gemm_nt_contiguous", (8, 256, 256)),
        ("m_grouped_fp8_gemm_nt_contiguous", (8, 256, 128)),
    ]
    assert {s.count for s in shapes.sites} == {2}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "give --fp8"),
        ({"quantization_config": {"quant_method": "awq"}}, "is quantised by awq"),
        ({"quantization_config": FP8, "model_type": "qwen3_moo"}, "did you mean 'qwen3_moe'"),
        ({"quantization_config": FP8, "model_type": "vit"}, "no causal language model"),
        ({"quantization_config": FP8, "model_type": None}, "no model_type"),
    ],
)
def test_a_configuration_that_is_not_supported_says_so(folder, capsys, changes, says):
    pytest.importorskip("transformers")
    values = {**CONFIG, **changes}
    Path("config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    assert main(["trace", "config.json"]) == FAILED
    assert says in capsys.readouterr().err


def test_doctor_names_libraries_compilers_and_caches(folder, capsys, monkeypatch):
    assert main(["doctor", "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert set(found["caches"]) == set(caches.NAMES)
    assert {"deep_gemm", "tilelang", "toy"} <= set(found["families"])
    monkeypatch.setenv("DG_JIT_DEBUG", "1")
    assert main(["doctor"]) == INCOMPLETE
    assert "DG_JIT_DEBUG is set" in capsys.readouterr().out


def dump(path: Path, text: str = "x" * 1000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def stored(folder, plan):
    """Entries in four caches, one of each kernel library used by a stored plan."""
    from fxwarm import store
    from fxwarm.records import Entry, Target

    env = {
        name: folder / name.lower()
        for name in os.environ
        if (folder / name.lower()).parent == folder
    }
    made = WarmPlan.from_json(plan.read_text())
    used, key = [], "a" * 32
    for name in ("kernel.used.0", "kernel.unused.1"):
        used.append(dump(env["DG_JIT_CACHE_DIR"] / "cache" / name / "kernel.cubin"))
        used.append(
            dump(env["TILELANG_CACHE_DIR"] / "0.1.15" / "linux-x86_64" / "kernels" / name / "k.so")
        )
        used.append(
            dump(
                env["FLASHINFER_WORKSPACE_BASE"]
                / ".cache/flashinfer/0.7/90a/cached_ops"
                / name
                / "k.so"
            )
        )
    used = used[:3]
    own = store.root(str(env["FXWARM_CACHE_DIR"]))
    entries = tuple(Entry(str(path), 1000) for path in used)
    report = WarmReport(key, Target.named("cpu"), entries=entries)
    dump(env["TORCHINDUCTOR_CACHE_DIR"] / "aotautograd" / f"a{key}" / "entry")
    import msgspec

    made = msgspec.structs.replace(made, graph_key=f"a{key}")
    assert store.write(store.path_of(own, key, "plan"), made.to_json())
    assert store.write(store.path_of(own, key, "receipt"), report.to_json())
    return {"deep_gemm": "DG_JIT_CACHE_DIR", "tilelang": "TILELANG_CACHE_DIR", "flashinfer": "FLASHINFER_WORKSPACE_BASE", "torch": "TORCHINDUCTOR_CACHE_DIR"}, key  # fmt: skip


def test_clean_shows_entries_sizes_and_users_and_removes_nothing(stored, capsys):
    _, key = stored
    assert main(["clean", "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    roots = {root["name"]: root for root in found["roots"]}
    assert list(roots) == list(caches.NAMES)
    for name in ("deep_gemm", "tilelang", "flashinfer"):
        users = {entry["name"]: entry["plans"] for entry in roots[name]["entries"]}
        assert users == {"kernel.used.0": [key], "kernel.unused.1": []}
        assert {entry["bytes"] for entry in roots[name]["entries"]} == {1000}
    assert [root["misses"] for root in roots.values()] == [0] * 5  # all are kept
    assert [root["hits"] for root in roots.values()] == [1] * 5
    assert found["freed"] == 0
    assert len(found["unused"]) == 3
    assert main(["clean"]) == DONE
    assert "3 unused" in capsys.readouterr().out


def test_a_cache_that_was_lost_shows_as_misses_by_name(stored, capsys, folder):
    # ai-dynamo/dynamo#10695: one cache kept across restarts, the others lost
    import shutil

    names, key = stored
    for name in ("deep_gemm", "tilelang", "flashinfer"):
        shutil.rmtree(os.environ[names[name]])
    (Path(os.environ["FXWARM_CACHE_DIR"]) / key / "receipt.json").rename(folder / "receipt.json")
    status = caches.examine()
    assert {root.name: root.misses for root in status.roots}["fxwarm"] == 1
    (folder / "receipt.json").rename(Path(os.environ["FXWARM_CACHE_DIR"]) / key / "receipt.json")
    misses = {root.name: root.misses for root in caches.examine().roots}
    assert misses == {"deep_gemm": 1, "flashinfer": 1, "tilelang": 1, "torch": 0, "fxwarm": 0}
    assert main(["clean"]) == DONE
    out = capsys.readouterr().out
    assert "deep_gemm: 1 of 1 are lost" in out


def test_clean_removes_only_what_no_plan_uses_and_only_from_the_named_root(stored, capsys):
    names, _ = stored
    cache = Path(os.environ[names["deep_gemm"]]) / "cache"
    outside = dump(cache.parent / "elsewhere" / "file")
    (cache / "kernel.link.2").symlink_to(outside.parent)
    assert main(["clean", "--root", "deep_gemm", "--yes", "--json"]) == DONE
    assert json.loads(capsys.readouterr().out)["freed"] > 1000
    assert [p.name for p in cache.iterdir()] == ["kernel.used.0"]
    assert outside.exists()  # a link is removed, never what it points to
    assert len(list(Path(os.environ[names["tilelang"]]).rglob("*.so"))) == 2


def test_help_has_examples_and_exit_statuses(capsys):
    for argv in (["--help"], ["trace", "--help"], ["clean", "--help"]):
        with pytest.raises(SystemExit) as stop:
            main(argv)
        assert stop.value.code == 0
        out = capsys.readouterr().out
        assert "examples:" in out
        assert "exit statuses:" in out


def test_the_command_line_runs_as_a_module_and_imports_torch_only_for_work():
    code = "import sys; from fxwarm.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, "-m", "fxwarm", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"fxwarm {fxwarm.__version__}"
