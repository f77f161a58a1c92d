"""Calls of DeepGEMM as records, and a fake DeepGEMM that behaves like either of its JIT generations."""

from __future__ import annotations

import textwrap
from pathlib import Path

from fxwarm.families.deep_gemm import digest
from fxwarm.records import Library
from passes.records import Dim, KernelCall, Symbol, TensorSpec

FP8, F32, BF16, I32 = "float8_e4m3fn", "float32", "bfloat16", "int32"


def dim(expr: str | int, lower: int, upper: int) -> Dim:
    return Dim.static(int(expr)) if str(expr).isdigit() else Dim(str(expr), lower, upper)


def spec(
    dtype: str, *dims: str | int, strides: tuple[str, ...] = (), upper: int = 8192
) -> TensorSpec:
    return TensorSpec(dtype, tuple(dim(d, 1, upper) for d in dims), strides)


def dense(
    n: int, k: int, m: str | int = "s0", upper: int = 8192, sf: tuple[str, ...] = (), **attrs
):
    tensors = (
        ("a", spec(FP8, m, k)),
        ("a_sf", spec(F32, m, -(-k // 128), strides=sf)),
        ("b", spec(FP8, n, k)),
        ("b_sf", spec(F32, -(-n // 128), -(-k // 128))),
        ("d", spec(BF16, m, n)),
    )
    return call("fp8_gemm_nt", tensors, upper if m == "s0" else None, attrs)


def contiguous(groups: int, n: int, k: int, m: str | int = "128*s0", upper: int = 640, **attrs):
    tensors = (
        ("a", spec(FP8, m, k, upper=128 * upper)),
        ("a_sf", spec(F32, m, -(-k // 128), upper=128 * upper)),
        ("b", spec(FP8, groups, n, k)),
        ("b_sf", spec(F32, groups, -(-n // 128), -(-k // 128))),
        ("d", spec(BF16, m, n, upper=128 * upper)),
        ("grouped_layout", spec(I32, groups if attrs.get("use_psum_layout") else m)),
    )
    symbols = upper if "s0" in str(m) else None
    return call("m_grouped_fp8_gemm_nt_contiguous", tensors, symbols, attrs)


def masked(groups: int, n: int, k: int, most: int, expected: str | int = "s0", upper: int = 1024):
    tensors = (
        ("a", spec(FP8, groups, most, k)),
        ("a_sf", spec(F32, groups, most, -(-k // 128))),
        ("b", spec(FP8, groups, n, k)),
        ("b_sf", spec(F32, groups, -(-n // 128), -(-k // 128))),
        ("d", spec(BF16, groups, most, n)),
        ("masked_m", spec(I32, groups)),
    )
    value = dim(expected, 1, upper) if expected == "s0" else int(expected)
    attrs = {"expected_m": value}
    return call("m_grouped_fp8_gemm_nt_masked", tensors, upper if expected == "s0" else None, attrs)


def prenorm(n: int, k: int, upper: int = 8192, sms: int = 132):
    splits = Dim(f"Max(1, Min({sms}//(((s0 + 63)//64)), {k // 64 // 4}))", 1, sms)
    tensors = (
        ("a", spec(BF16, "s0", k)),
        ("b", spec(F32, n, k)),
        ("d", TensorSpec(F32, (splits, dim("s0", 1, upper), Dim.static(n)))),
        ("sqr_sum", TensorSpec(F32, (splits, dim("s0", 1, upper)))),
    )
    return call("tf32_hc_prenorm_gemm", tensors, upper, {"num_splits": splits})


def call(op: str, tensors, upper: int | None, attrs) -> KernelCall:
    symbols = (Symbol("s0", 1, upper),) if upper is not None else ()
    return KernelCall("deep_gemm", op, tuple(tensors), tuple(attrs.items()), symbols)


def sgl(version: str = "0.1.5.post1", **settings: str) -> Library:
    pairs = tuple(sorted({"generation": "A", **settings}.items()))
    return Library("sgl-deep-gemm", version, settings=pairs)


def write_package(
    site: Path, generation: str = "A", body: str = "", *, real_torch: bool = False
) -> Path:
    """Write a ``deep_gemm`` into ``site``: real rules, real cache layout, a launch that is only counted.

    Unless ``real_torch`` is set, a stub of torch stands beside it, for children of this process.
    """
    site.mkdir(exist_ok=True)
    if not real_torch:
        site.joinpath("torch.py").write_text(STUB)
    package = site / "deep_gemm"
    (package / "include" / "deep_gemm" / "impls").mkdir(parents=True)
    (package / "include" / "deep_gemm" / "common.cuh").write_text("// common\n")
    for name in ("sm90_fp8_gemm_1d2d", "smxx_layout", "sm90_tf32_hc_prenorm_gemm"):
        header = package / "include" / "deep_gemm" / "impls" / f"{name}.cuh"
        header.write_text("#pragma once\n#include <deep_gemm/common.cuh>\n// " + name + "\n")
    info = site / "sgl_deep_gemm-0.1.5.post1.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(
        "Metadata-Version: 2.1\nName: sgl-deep-gemm\nVersion: 0.1.5.post1\n"
    )
    text = FAKE.replace("@GENERATION@", generation) + textwrap.dedent(body)
    package.joinpath("__init__.py").write_text(text)
    return package


def name_of(
    tag: str, code: str, flags: tuple[str, ...], generation: str, package: Path, text: str
) -> str:
    """The name of an entry, by fxwarm's own digests."""
    if generation == "A":
        return digest.name_a(tag, code, flags, (13, 0))
    include = package / "include"
    kept = [f for f in flags if f not in ("--include-path", str(include))]
    return digest.name_b(tag, code, kept, compiler_text=text, include=include, cutlass="481")


STUB = '''
"""As much of torch as the recorder's child needs: tensors are shapes. Importing torch takes seconds."""
from types import SimpleNamespace as New

class Kind(New):
    def __str__(self): return "torch." + self.name
    @property
    def is_floating_point(self): return "float" in self.name
for _name, _size in [("uint8", 1), ("float8_e4m3fn", 1), ("bfloat16", 2), ("float32", 4), ("int32", 4)]:
    globals()[_name] = Kind(name=_name, itemsize=_size)

class Tensor:
    def __init__(self, size, dtype, stride=(1,)): self.shape, self.dtype, self._stride = tuple(size), dtype, stride
    def __len__(self): return self.shape[0]
    def __getitem__(self, part): return Tensor((len(range(len(self))[part]),), self.dtype)
    def view(self, dtype): return Tensor((len(self) * self.dtype.itemsize // dtype.itemsize,), dtype)
    def as_strided(self, size, stride):
        span = 1 + sum((d - 1) * s for d, s in zip(size, stride))
        assert not all(size) or span <= len(self), "out of bounds"
        return Tensor(size, self.dtype, tuple(stride))
    def stride(self, at=None): return self._stride if at is None else self._stride[at]
    def fill_(self, value): return self
    def copy_(self, other): return self
    def numel(self):
        n = 1
        for d in self.shape: n *= d
        return n

def zeros(size, dtype, device): return Tensor((size,), dtype)
ones = zeros
def full(size, value, dtype, device): return Tensor(size, dtype)
def tensor(values, dtype): return Tensor((len(values),), dtype)
def device(kind): return New(type=kind)
cuda = New(is_initialized=lambda: False)
'''

FAKE = '''
"""A DeepGEMM without CUDA: its rules, its hashes, its cache, its compiler command; launches nothing."""
import os, re, shutil, subprocess, uuid
from functools import reduce
from pathlib import Path
from fxwarm.families.deep_gemm import heuristics as h

__version__ = "0.1.5"
GENERATION = "@GENERATION@"
HERE = Path(os.path.abspath(__file__)).parent
VERSION = h.resolve_version("sgl-deep-gemm", "0.1.5.post1")
_sms = [132]
_compiler = []
_loaded = {}
launches = []

def set_num_sms(n): _sms[0] = n
def get_num_sms(): return _sms[0]
def get_mk_alignment_for_contiguous_layout(): return 128
def set_mk_alignment_for_contiguous_layout(n): assert n == 128

M = 2**64 - 1
def mix(z):
    z = ((z ^ z >> 30) * 0xbf58476d1ce4e5b9) & M
    z = ((z ^ z >> 27) * 0x94d049bb133111eb) & M
    return format(z ^ z >> 31, "016x")
def walk(seed, prime, data): return reduce(lambda s, c: (s ^ c) * prime & M, data, seed)
def hash_a(text):
    data = text.encode()
    return mix(walk(0xc6a4a7935bd1e995, 0x100000001b3, data)) + mix(walk(0x9e3779b97f4a7c15, 0x100000001b3, data))
class HashB:
    def __init__(self): self.x, self.y = 0xc6a4a7935bd1e995, 0xff51afd7ed558ccd
    def update(self, text):
        data = len(text.encode()).to_bytes(8, "little") + text.encode()
        self.x, self.y = walk(self.x, 0x100000001b3, data), walk(self.y, 0x9e3779b97f4a7c15, data)
        return self
    def hex(self): return mix(self.x) + mix(self.y)
def includes(text): return re.findall(r"#include <(deep_gemm[^>]*)>", text)
def includes_a(text, own=False):
    joined = "".join(includes_a((HERE / "include" / i).read_text(), True) + "$" for i in includes(text))
    return hash_a(joined + ("#" + hash_a(text) if own else ""))
def source_b(text):
    state = HashB().update(text)
    for i in includes(text): state.update(source_b((HERE / "include" / i).read_text()))
    return state.hex()

def compiler():
    if not _compiler:
        nvcc = os.environ.get("DG_JIT_NVCC_COMPILER") or os.environ["CUDA_HOME"] + "/bin/nvcc"
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
        cache = os.environ.get("DG_JIT_CACHE_DIR") or os.environ["HOME"] + "/.deep_gemm"
        roots = cache.split(":") if GENERATION == "B" else [cache]
        _compiler.append((nvcc, text, [Path(r) for r in roots]))
    return _compiler[0]

def uses_nvrtc(): return GENERATION == "A" and os.environ.get("DG_JIT_USE_NVRTC", "0") == "1"

def nvrtc(code):
    """Compile in process. A compile that fails prints why and gives 0 bytes, which are published all the same."""
    return Path(os.environ["CUDA_HOME"], "some.cubin").read_bytes()

def build(tag, code):
    if uses_nvrtc(): nvcc, text, roots = None, "release 13.0", [Path(os.environ["DG_JIT_CACHE_DIR"])]
    else: nvcc, text, roots = compiler()
    major, minor = re.search(r"release (\\d+)\\.(\\d+)", text).groups()
    if GENERATION == "A":
        code = "// Includes' hash value: " + includes_a(code) + "\\n" + code
        flags = f"-std=c++20 -I{HERE}/include --gpu-architecture=sm_90a " + ("--pch" if nvcc is None else "-O3")
        signature = f"NVRTC{major}.{minor}" if nvcc is None else f"NVCC{major}.{minor}"
        name = "kernel." + tag + "." + hash_a("$$".join([tag, signature, flags, code]))
    else:
        flags = "--gpu-architecture=sm_90a -O3 -std=c++20"
        state = HashB().update("cutlass-481").update(HashB().update(text).hex()).update(flags)
        name = tag + "." + state.update("").update(source_b(code)).hex()
        flags += f" --include-path {HERE}/include"
    if name in _loaded: return name
    mark = "kernel.cubin" if GENERATION == "A" else ".committed"
    for root in roots:
        folder = root / "cache" / name
        if folder.exists():
            assert (folder / mark).exists(), "Corrupted JIT cache directory"
            break
    else:
        tmp = roots[0] / "tmp" / uuid.uuid4().hex
        tmp.mkdir(parents=True)
        (tmp / "kernel.cu").write_text(code)
        out = tmp / "kernel.cubin"
        command = (f"{nvcc} {tmp}/kernel.cu -cubin -o {out} {flags}" if GENERATION == "A"
                   else f"{nvcc} --cubin --output-file {out} {flags} {tmp}/kernel.cu")
        if nvcc is None:
            out.write_bytes(nvrtc(code))
        elif (done := subprocess.run(f"cd {tmp.parent} && {command}", shell=True, capture_output=True, text=True)).returncode:
            shutil.rmtree(tmp)
            raise RuntimeError("NVCC compilation failed: " + done.stdout + done.stderr)
        if GENERATION == "B": (tmp / ".committed").touch()
        folder = roots[0] / "cache" / name
        folder.parent.mkdir(exist_ok=True)
        try: os.rename(tmp, folder)
        except OSError: shutil.rmtree(tmp)  # another process was faster
    assert (folder / "kernel.cubin").read_bytes()[:4] == b"\\x7fELF", "device kernel image is invalid"
    _loaded[name] = folder
    return name

def run(kernel, header):
    code = (f"\\n#include <deep_gemm/impls/{header}.cuh>\\n\\nusing namespace deep_gemm;\\n\\n"
            "static void __instantiate_kernel() {\\n    auto ptr = reinterpret_cast<void*>(&"
            f"{kernel.kernel}<\\n        " + ",\\n        ".join(kernel.template) + "\\n    >);\\n};\\n")
    launches.append(build(kernel.tag, code))

def scales(sf):
    kernel = h.get_mn_major_tma_aligned_tensor(tuple(sf.shape), tuple(sf.stride()), VERSION)
    if kernel is not None: run(kernel, "smxx_layout")

def settings(): return h.Settings(num_sms=_sms[0])

def fp8_gemm_nt(a, b, d, c=None, recipe=None, compiled_dims=None, disable_ue8m0_cast=False):
    (a, a_sf), (b, b_sf) = a, b
    (m, k), (n, k2) = a.shape, b.shape
    assert k == k2 and tuple(d.shape) == (m, n) and tuple(a_sf.shape) == (m, -(-k // 128))
    assert str(a.dtype) == "torch.float8_e4m3fn" and a.stride(-1) == 1
    if m == 0: return
    scales(a_sf)
    gemm = h.fp8_gemm_nt(n, k, VERSION, settings(), compiled_dims=compiled_dims)
    run(h.kernel_at(gemm, m, VERSION), "sm90_fp8_gemm_1d2d")

def m_grouped_fp8_gemm_nt_contiguous(a, b, d, grouped_layout, use_psum_layout=False, compiled_dims=None):
    (a, a_sf), (b, b_sf) = a, b
    (m, k), (g, n, _) = a.shape, b.shape
    assert tuple(d.shape) == (m, n) and (use_psum_layout or grouped_layout.numel() == m)
    scales(a_sf)
    gemm = h.m_grouped_fp8_gemm_nt_contiguous(g, n, k, VERSION, settings(), use_psum_layout=use_psum_layout)
    run(h.kernel_at(gemm, m, VERSION), "sm90_fp8_gemm_1d2d")

def fp8_m_grouped_gemm_nt_masked(a, b, d, masked_m, expected_m):
    (a, a_sf), (b, b_sf) = a, b
    (g, m, k), (_, n, _) = a.shape, b.shape
    assert expected_m > 0 and m > 0 and masked_m.numel() == g
    scales(a_sf)
    gemm = h.m_grouped_fp8_gemm_nt_masked(g, n, k, VERSION, settings(), max_m=m)
    run(h.kernel_at(gemm, expected_m, VERSION), "sm90_fp8_gemm_1d2d")

def tf32_hc_prenorm_gemm(a, b, d, sqr_sum, num_splits=None):
    (m, k), (n, _) = a.shape, b.shape
    assert tuple(d.shape) == ((num_splits, m, n) if num_splits else (m, n))
    if m: run(h.tf32_hc_prenorm_gemm(n, k, num_splits or 1), "sm90_tf32_hc_prenorm_gemm")
'''
