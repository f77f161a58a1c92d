"""The bf16 part of FlashInfer's ``fused_moe_90``: 32 of its 247 translation units, 302 s instead of 40 minutes.

Made at run time from the installed sources, into private copies; nothing of the library is kept here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


def make_subset(whole: Callable[[], Any]) -> Any:
    """Return the library's spec of ``fused_moe_90`` with bf16 alone; every other dtype says so when it is asked for."""
    from flashinfer.jit import env
    from flashinfer.jit.core import gen_jit_spec

    spec = whole()
    folder = env.FLASHINFER_GEN_SRC_DIR / "bf16_subset"
    folder.mkdir(parents=True, exist_ok=True)
    kept = []
    for source in spec.sources:
        text = source.read_text()
        if source.name.endswith(".generated.cu"):
            if "_sm80_" in source.name and "cutlass::bfloat16_t" in text:
                kept.append(write(folder / "sm80" / source.name, only_bf16(text)))
            elif (
                text.count("__nv_bfloat16, __nv_bfloat16, __nv_bfloat16")
                == text.count("INSTANTIATE_")
                > 0
            ):
                kept.append(source)
        elif source.name == "flashinfer_cutlass_fused_moe_binding.cu":
            begin, end = (
                text.index("    auto make_humming_runner"),
                text.index("    if (!mKernelRunner) {"),
            )
            runner = (
                "    if (mActivationDtype == dl_bfloat16 && mWeightDtype == dl_bfloat16) {\n"
                "      mKernelRunner = std::make_shared<"
                "kernels::CutlassMoeFCRunner<__nv_bfloat16, __nv_bfloat16>>();\n    }\n"
            )
            kept.append(write(folder / "copies" / source.name, text[:begin] + runner + text[end:]))
        elif source.name == "cutlass_fused_moe_instantiation.cu":
            wanted = "template class CutlassMoeFCRunner<__nv_bfloat16, __nv_bfloat16>;"
            text = re.sub(
                r"template class CutlassMoeFCRunner<[^;]*;",
                lambda m: m[0] if m[0] == wanted else "",
                text,
            )
            kept.append(write(folder / "copies" / source.name, text))
        elif (
            not source.name.startswith("moe_gemm_kernels_")
            or source.name == "moe_gemm_kernels_bf16_bf16.cu"
        ):
            kept.append(source)
    flags = [
        f
        for f in spec.extra_cuda_cflags
        if f.startswith(("-D", "-gencode")) and f != "-DENABLE_FP8_BLOCK_SCALE"
    ]
    return gen_jit_spec(
        spec.name,
        sorted(kept, key=lambda p: (not p.name.endswith(".generated.cu"), str(p))),  # longest first
        extra_cuda_cflags=flags,
        extra_ldflags=spec.extra_ldflags,
        extra_include_paths=[
            *spec.extra_include_dirs,
            env.FLASHINFER_CSRC_DIR / "fused_moe" / "cutlass_backend",
        ],
    )


def only_bf16(text: str) -> str:
    """Return generated SM80 launchers without those of other dtypes."""
    keep = "sm80_generic_fused_moe_gemm_kernelLauncher<cutlass::bfloat16_t, cutlass::bfloat16_t"
    return re.sub(r"template void [^;]*;", lambda m: m[0] if keep in m[0] else "", text)


def write(path: Path, text: str) -> Path:
    """Write ``text`` unless it is there: ninja looks at times."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)
    return path


def use_subset() -> None:
    """Make the library build and load the subset under its own name."""
    from flashinfer.fused_moe import core

    made = make_subset(core.gen_cutlass_fused_moe_sm90_module)
    core.gen_cutlass_fused_moe_sm90_module = lambda use_fast_build=False: made
