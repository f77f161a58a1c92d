"""What fxwarm does, shown without a GPU: big models traced, FlashInfer calls planned, a small model run cold and warm.

The big ones are public architectures in transformers' own code, their linears and experts replaced by calls of
DeepGEMM's ops: the shape sets need neither weights nor a device. The FlashInfer plan needs no FlashInfer. The small
model compiles real TileLang kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["run"]


def run(  # noqa: PLR0917
    models: Sequence[str] = ("qwen3-30b-a3b", "deepseek-v3"),
    tokens: int = 8192,
    calls: int = 50,
    json: bool = False,
    layers: int | None = None,
    console: Console | None = None,
) -> int:
    """Trace ``models`` and plan FlashInfer's for up to ``tokens`` tokens, time ``calls`` of the small one; print all.

    ``layers`` cuts each model to its first layers; ``calls`` 0 skips the small one. With ``json`` one JSON object is
    printed in the place of tables. Returns 0, or 1 where something is a gap or was compiled late.

    Raises OptionError for an unknown model, LibraryError where transformers or TileLang is needed and absent.
    """
    import msgspec
    from rich.console import Console

    from fxwarm.demo import compare, facts, fused_moe, report
    from fxwarm.demo.models import find

    for name in models:
        find(name)
    console = Console() if console is None else console
    busy = Console(quiet=True) if json else console
    traced = []
    for name in models:
        with busy.status(f"tracing {find(name).title} …"):
            traced.append(facts.trace_model(name, tokens, layers))
        report.print_traced(busy, traced[-1])
    with busy.status("planning FlashInfer's fused MoE …"):
        fused = fused_moe.plan_model(tokens)
    report.print_fused(busy, fused)
    mhc = None
    if calls > 0:
        with busy.status(f"running {calls} token counts without fxwarm, then with it …"):
            mhc = compare.compare(calls)
        report.print_comparison(busy, mhc)
    problems = report.problems_of(tuple(traced), mhc, fused)
    if json:
        print(msgspec.json.encode(report.Demo(tuple(traced), fused, mhc, problems)).decode())
    for problem in problems:
        busy.print(f"problem: {problem}", style="red")
    return 1 if problems else 0
