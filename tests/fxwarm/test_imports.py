"""What importing costs and what it touches."""

from __future__ import annotations

import subprocess
import sys

import fxwarm


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_fxwarm_imports_neither_torch_nor_a_kernel_library():
    code = "import sys, fxwarm; print([m for m in ('torch','sympy','tilelang','deep_gemm','flashinfer') if m in sys.modules])"
    assert _run(code) == "[]"


def test_importing_fxwarm_after_torch_brings_none_of_the_heavy_modules():
    code = "import sys, torch, fxwarm; print([m for m in ('sympy', 'torch._dynamo', 'rich', 'tilelang') if m in sys.modules])"
    assert _run(code) == "[]"


def test_no_public_name_is_the_name_of_a_module():
    import pkgutil

    modules = {m.name for m in pkgutil.iter_modules(fxwarm.__path__)}
    assert not modules & set(fxwarm.__all__)


def test_every_public_name_exists():
    for name in fxwarm.__all__:
        assert getattr(fxwarm, name) is not None


def test_passes_never_imports_fxwarm():
    code = "import sys, passes, passes.collect, passes.bound, passes.flatten; print('fxwarm' in sys.modules)"
    assert _run(code) == "False"
