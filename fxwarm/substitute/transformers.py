"""transformers' fp8 models with the DeepGEMM that is installed, in the place of the one that it would fetch.

transformers loads a bundle of kernels from the Hub at the first call, and asks before whether this machine can run it.
``use_deep_gemm()`` puts our ops into that bundle, which call the installed library; while a model is traced for a named
target, both questions are answered from the target. Without a target and a GPU the answer "no" makes it choose other
kernels, so the trace gets a gap.

Source: transformers 5.17 and 5.24, ``integrations/deepgemm.py`` and ``integrations/finegrained_fp8.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fxwarm.records import Target
from fxwarm.substitute import functions
from fxwarm.substitute.device import capability_of, replace

__all__ = ["answer_for", "note_questions", "use_deep_gemm"]

_HOME = "transformers.integrations.deepgemm"
_TESTS = ("is_deepgemm_loadable", "is_sm100")
ALIGNMENT = 128
"""Rows that the share of each expert is padded to: the library's default, which transformers never sets."""

Pair = tuple[Tensor, Tensor]


def use_deep_gemm() -> None:
    """Let transformers' fp8 layers call the installed DeepGEMM through fxwarm's ops, without the Hub.

    Raises ImportError for a transformers without DeepGEMM (before 5.0).
    """
    import transformers.integrations.deepgemm as home

    home._DEEPGEMM = _bundle(home)
    for module in _users():
        # asked first in each call; without the `kernels` package it would say no
        module.is_deepgemm_loadable = _yes


@contextlib.contextmanager
def answer_for(target: Target) -> Iterator[None]:
    """Answer transformers' own questions from ``target`` until the end of the block, and lend it the bundle."""
    home = sys.modules.get(_HOME)
    if home is None:
        yield
        return
    major, _ = capability_of(target)
    with contextlib.ExitStack() as stack:
        if getattr(home, "_DEEPGEMM", None) is None and hasattr(home, "DeepGEMM"):
            stack.enter_context(replace(home, "_DEEPGEMM", _bundle(home)))
        answers = dict(
            zip(
                _TESTS,
                (_yes if major in (9, 10) else _no, _yes if major >= 10 else _no),
                strict=True,
            )
        )
        for module in _users():
            for name, answer in answers.items():
                if hasattr(module, name):
                    stack.enter_context(replace(module, name, answer))
        yield


@contextlib.contextmanager
def note_questions() -> Iterator[list[str]]:
    """Without a target and a GPU: yield a list that gets each question whose answer changed what is traced."""
    asked: list[str] = []
    if torch.cuda.is_available() or _HOME not in sys.modules:
        yield asked
        return

    def noting(name: str, question: Any) -> Any:
        @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
        def ask(*args: Any, **kwargs: Any) -> Any:
            answer = False
            with contextlib.suppress(Exception):  # some ask the driver, which is not there
                answer = question(*args, **kwargs)
            if not answer and name not in asked:
                asked.append(name)
                known = functions.Substitute("transformers", name, question)
                functions.refuse(
                    known,
                    "there is no GPU here, so the model chooses other kernels than on one; "
                    'trace it with target="h200", or another that it will run on',
                )
            return answer

        return ask

    with contextlib.ExitStack() as stack:
        for module in _users():
            for name in _TESTS:
                if hasattr(module, name) and getattr(module, name) is not _yes:
                    stack.enter_context(replace(module, name, noting(name, getattr(module, name))))
        yield asked


def _users() -> list[Any]:
    return [
        m
        for name, m in list(sys.modules.items())
        if name.startswith("transformers.integrations.") and m
    ]


def _bundle(home: Any) -> Any:
    """Return transformers' own record of kernels, filled with our ops. What has none raises when called."""
    import fxwarm.ops  # noqa: F401  (defines the ops)

    given = {
        "fp8_fp4_matmul": _linear,
        "grouped_fp8_fp4_matmul_nt": _grouped("nt"),
        "grouped_fp8_fp4_matmul_nn": _grouped("nn"),
        "grouped_bf16_matmul_nt": _grouped_bf16("nt"),
        "grouped_bf16_matmul_nn": _grouped_bf16("nn"),
        "per_token_cast_to_fp8": _cast,
        "m_alignment": ALIGNMENT,
    }
    return home.DeepGEMM(
        **{f.name: given.get(f.name, _absent) for f in dataclasses.fields(home.DeepGEMM)}
    )


def _linear(a: Pair, b: Pair, d: Tensor, recipe: Any = None) -> None:
    torch.ops.fxwarm.fp8_gemm_nt(a[0], a[1], b[0], b[1], d, recipe=recipe)


def _grouped(form: str) -> Callable[..., None]:
    """Return transformers' grouped call for weights stored in ``form``, "nt" or "nn"."""
    op = getattr(torch.ops.fxwarm, f"m_grouped_fp8_gemm_{form}_contiguous")

    def call(  # noqa: PLR0917 (the library's order)
        a: Pair,
        b: Pair,
        d: Tensor,
        layout: Tensor,
        recipe: Any = None,
        use_psum_layout: bool = False,
    ) -> None:
        op(a[0], a[1], b[0], b[1], d, layout, recipe=recipe, use_psum_layout=use_psum_layout)

    return call


def _grouped_bf16(form: str) -> Callable[..., None]:
    op = getattr(torch.ops.fxwarm, f"m_grouped_bf16_gemm_{form}_contiguous")

    def call(
        a: Tensor, b: Tensor, d: Tensor, layout: Tensor, use_psum_layout: bool = False
    ) -> None:
        op(a, b, d, layout, use_psum_layout=use_psum_layout)

    return call


def _cast(
    x: Tensor, use_ue8m0: bool = False, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> Pair:
    from fxwarm.ops import per_token_cast_to_fp8

    a, sf = per_token_cast_to_fp8(x, gran_k)
    if not use_ue8m0:
        return a, sf
    if x.device.type != "meta":
        raise NotImplementedError(
            "scales in UE8M0 are cast by the library only; install the Hub's kernels"
        )
    width = (sf.shape[-1] + 3) // 4
    return a, sf.new_empty(sf.shape[0], width, dtype=torch.int32) if use_packed_ue8m0 else sf


def _absent(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("fxwarm has no op for this kernel of transformers'; use the Hub's")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _yes(raise_error: bool = False) -> bool:
    return True


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _no(raise_error: bool = False) -> bool:
    return False
