"""From a config to the kernel: the template arguments that the library's source generator writes.

SM90: one function a kernel kind, in the argument order of each build. SM100: see ``_sm100``.
Source: ``generate_impl`` of DeepGEMM's ``csrc/jit_kernels/impls`` files, and recorded sources.
"""

from __future__ import annotations

from fxwarm.families.deep_gemm.heuristics.arith import align
from fxwarm.families.deep_gemm.heuristics.descriptor import Dtype, Gemm, Major
from fxwarm.families.deep_gemm.heuristics.errors import Unmodelled
from fxwarm.families.deep_gemm.heuristics.kernel import Config, Kernel
from fxwarm.families.deep_gemm.heuristics.versions import Version

__all__ = ["generate"]

_DTYPES: dict[Dtype, str] = {
    "fp8": "cutlass::float_e4m3_t",
    "bf16": "cutlass::bfloat16_t",
    "fp32": "float",
}


def generate(gemm: Gemm, config: Config, m: int, version: Version) -> Kernel:
    """Return the kernel that ``version`` compiles for a config; ``m`` is M where it is literal."""
    if gemm.settings.arch == 100:
        kernel = (
            "sm100_bf16_gemm_impl" if gemm.kernel_type == "NoSF" else "sm100_fp8_fp4_gemm_1d1d_impl"
        )
        template = _sm100(gemm, config, m, version)
    elif gemm.kernel_type == "1D2D":
        kernel, template = "sm90_fp8_gemm_1d2d_impl", _sm90_1d2d(gemm, config, m, version)
    elif gemm.kernel_type == "1D1D":
        kernel, template = "sm90_fp8_gemm_1d1d_impl", _sm90_1d1d(gemm, config, m, version)
    else:
        kernel, template = "sm90_bf16_gemm_impl", _sm90_bf16(gemm, config, m, version)
    return Kernel(
        gemm.tag,
        kernel,
        tuple(map(_text, template)),
        threads=config.tma_threads + config.math_threads,
        smem=config.smem,
        cluster=config.cluster,
    )


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _major(major: Major) -> str:
    return f"cute::UMMA::Major::{major}"


def _dims(gemm: Gemm, config: Config, m: int, version: Version) -> list[object]:
    """Return M, N, K as literals or 0, the groups, and the tile."""
    dims = "" if gemm.settings.ignore_compile_dims else gemm.compiled_dims
    k = gemm.k
    if version.heuristics == "old" and gemm.kernel_type == "1D2D":
        k = align(k, 128)
    if "n" not in dims and _compiles_n_anyway(gemm, config, version):
        dims += "n"
    if gemm.gemm_type == "KGroupedContiguous" and "k" in dims:
        raise Unmodelled("a k-grouped call with K compiled in has sum(ks) in its kernel")
    sizes = {"m": m, "n": gemm.n, "k": k}
    literal: list[object] = [size if name in dims else 0 for name, size in sizes.items()]
    return [*literal, gemm.groups, config.block_m, config.block_n, config.block_k]


def _compiles_n_anyway(gemm: Gemm, config: Config, version: Version) -> bool:
    """Whether a build of sgl-deep-gemm compiles N in on its own (0.2.5: yes, for wide tiles)."""
    wide = config.block_m == 128 and config.block_n > 128 and config.cluster == 1
    dense = gemm.gemm_type == "Normal" and gemm.kernel_type == "1D2D"
    if not (wide and dense) or gemm.settings.ignore_compile_dims:
        return False
    if version.wide_tiles_compile_n is None:
        raise Unmodelled(
            f"whether {version.distribution} {version.number} compiles N={gemm.n} into dense "
            f"kernels of tile 128 x {config.block_n} is not known"
        )
    return version.wide_tiles_compile_n


def _launch(config: Config) -> list[object]:
    return [
        config.tma_threads,
        config.math_threads,
        config.cluster,
        config.multicast_a,
        config.num_sms,
    ]


def _sm90_1d2d(gemm: Gemm, config: Config, m: int, version: Version) -> list[object]:
    old = version.heuristics == "old"
    swizzles = [config.swizzle_a, config.swizzle_b, config.swizzle_cd]
    stages = [config.stages] if version.heuristics == "new" else [config.stages, config.last_stages]
    tail: dict[str, object] = {
        "cd_dtype": _DTYPES[gemm.d_dtype],
        "epilogue": gemm.epilogue,
        "sf_gran": gemm.gran_k,
    }
    if version.tail is None:
        raise Unmodelled(
            f"the last template arguments of {gemm.tag} in {version.distribution} "
            f"{version.number} are not known"
        )
    return [
        *([] if old else [_major(gemm.major_sfb)]),
        *_dims(gemm, config, m, version),
        *(swizzles[2:] if old else swizzles),
        *stages,
        *_launch(config),
        f"GemmType::{gemm.gemm_type}",
        *(tail[name] for name in version.tail),
    ]


def _sm90_1d1d(gemm: Gemm, config: Config, m: int, version: Version) -> list[object]:
    return [
        *_dims(gemm, config, m, version),
        config.swizzle_a,
        config.swizzle_b,
        config.stages,
        *_launch(config),
        f"GemmType::{gemm.gemm_type}",
        _DTYPES[gemm.d_dtype],
    ]


def _sm90_bf16(gemm: Gemm, config: Config, m: int, version: Version) -> list[object]:
    if version.heuristics == "old":
        return [
            *_dims(gemm, config, m, version),
            config.swizzle_cd,
            config.stages,
            config.last_stages,
            *_launch(config),
            f"GemmType::{gemm.gemm_type}",
        ]
    return [
        _major(gemm.major_a),
        _major(gemm.major_b),
        *_dims(gemm, config, m, version),
        config.swizzle_a,
        config.swizzle_b,
        config.swizzle_cd,
        config.stages,
        *_launch(config),
        f"GemmType::{gemm.gemm_type}",
        gemm.with_accumulation,
        _DTYPES[gemm.d_dtype],
    ]


def _sm100(gemm: Gemm, config: Config, m: int, version: Version) -> list[object]:
    """Return what decides an SM100 kernel, in about the order of the source.

    Enough to count kernels and tell them apart, not the literal template: builds differ in it
    (k alignment, zero padding, psum, epilogue, tensor-core utilisation), and none was run here.
    """
    scales: list[object] = [] if gemm.kernel_type == "NoSF" else [gemm.gran_k, gemm.gran_k]
    *dims, groups, block_m, block_n, block_k = _dims(gemm, config, m, version)
    return [
        _major(gemm.major_a),
        _major(gemm.major_b),
        *scales,
        *dims,
        block_m,
        block_n,
        block_k,
        groups,
        config.swizzle_a,
        config.swizzle_b,
        config.swizzle_cd,
        config.stages,
        *_launch(config),
        int(config.swap_ab),
        f"GemmType::{gemm.gemm_type}",
        gemm.with_accumulation,
        _DTYPES[gemm.ab_dtype],
        _DTYPES[gemm.ab_dtype],
        _DTYPES[gemm.d_dtype],
    ]
