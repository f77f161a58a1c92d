"""What the demo prints: a shape set a model, then the small model's calls side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxwarm.demo.compare import Comparison, builds_after_first, splits
from fxwarm.demo.facts import Traced
from fxwarm.demo.fused_moe import Fused
from passes.records import Record
from passes.table import Table, plural, size

if TYPE_CHECKING:
    from rich.console import Console


TITLE = "mHC mixture of experts on the CPU, each side in a fresh process with empty caches"


class Demo(Record, frozen=True):
    """All that one run of the demo found."""

    models: tuple[Traced, ...] = ()
    fused: Fused | None = None
    mhc: Comparison | None = None
    problems: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether nothing is a gap, nothing was compiled after the first warm call, and the outputs agree."""
        return not self.problems


def problems_of(
    models: tuple[Traced, ...], mhc: Comparison | None, fused: Fused | None = None
) -> tuple[str, ...]:
    """Return what is not as it should be, a line each."""
    out = [f"{m.title}: {plural(len(m.shapes.gaps), 'gap')}" for m in models if m.shapes.gaps]
    if fused is not None:
        out += [f"FlashInfer: {gap}" for gap in (*fused.plan.shapes.gaps, *fused.plan.gaps)]
    if mhc is not None:
        late = builds_after_first(mhc.with_fxwarm)
        if late:
            out.append(f"with fxwarm {plural(late, 'kernel')} compiled after the first call")
        if not mhc.same_outputs:
            out.append("the outputs with and without fxwarm differ")
    return tuple(out)


def print_traced(console: Console, traced: Traced) -> None:
    """Print the shape set of a model, its gaps, and what tracing cost."""
    console.print(
        f"[bold]{traced.title}[/bold], {plural(traced.layers, 'layer')}, on the meta device"
    )
    console.print(traced.shapes)
    shapes = ", ".join(str(w.shape) for w in traced.weights)
    console.print(f"(N, K) of linears, (G, N, K, top-k) of experts: {shapes}", highlight=False)
    console.print(
        f"traced in {traced.seconds:.1f} s, process peak {size(traced.peak_bytes)}\n",
        highlight=False,
    )


def print_fused(console: Console, fused: Fused) -> None:
    """Print the shape set of the fused MoE, and what an H200 would build and tune for it."""
    plan = fused.plan
    library = f"{plan.libraries[0].distribution} {plan.libraries[0].version}"
    console.print(
        f"[bold]FlashInfer fused MoE[/bold], planned for {plan.target.name} with {library}; "
        "nothing is built or tuned here",
        highlight=False,
    )
    console.print(plan.shapes)
    console.print(f"modules to build: {', '.join(fused.modules)}", highlight=False)
    each = ", ".join(f"{len(one.buckets)} of {one.gemm} ({one.op})" for one in fused.tuned)
    console.print(f"tactics to tune: {each}", highlight=False)
    buckets = sorted({bucket for one in fused.tuned for bucket in one.buckets})
    console.print(
        f"each is for steps of up to {', '.join(map(str, buckets))} tokens", highlight=False
    )
    console.print(
        f"{plural(fused.entries, 'tactic')} serve every size; planned in {fused.seconds:.1f} s\n",
        highlight=False,
    )


def print_comparison(console: Console, mhc: Comparison) -> None:
    """Print each call of the small model without and with fxwarm, then the sums."""
    from rich import box
    from rich.table import Table as RichTable

    console.print(f"[bold]{TITLE}[/bold]")
    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in (
        "call",
        "tokens",
        "splits",
        "ms without",
        "ms with",
        "JIT builds without",
        "with",
    ):
        table.add_column(column, justify="right")
    pairs = zip(mhc.without.calls, mhc.with_fxwarm.calls, strict=True)
    for index, (cold, warm) in enumerate(pairs, 1):
        table.add_row(
            str(index),
            f"{cold.tokens:,}",
            str(splits(cold)),
            f"{cold.seconds * 1e3:,.0f}",
            f"{warm.seconds * 1e3:,.0f}",
            str(cold.builds or ""),
            str(warm.builds or ""),
            style="bold" if index > 1 and (cold.builds or warm.builds) else None,
        )
    console.print(table)
    console.print(summary(mhc))


def summary(mhc: Comparison) -> Table:
    """Return what the first call cost, and what came after it."""
    rows = []
    for name, run in (("without", mhc.without), ("with", mhc.with_fxwarm)):
        rest = [call.seconds for call in run.calls[1:]]
        rows.append(
            (
                name,
                f"{run.calls[0].seconds:.1f} s",
                str(run.built_ahead),
                str(builds_after_first(run)),
                f"{max(rest, default=0.0) * 1e3:,.0f} ms",
                f"{sum(rest):.1f} s",
            )
        )
    columns = (
        "fxwarm",
        "first call>",
        "built ahead>",
        "JIT builds after first call>",
        "slowest later call>",
        "later calls>",
    )
    same = "the outputs are the same to the last bit" if mhc.same_outputs else "THE OUTPUTS DIFFER"
    distinct = len({splits(call) for call in mhc.without.calls})
    note = (
        f"{plural(len(mhc.without.calls), 'call')}, {distinct} distinct numbers of splits; {same}"
    )
    return Table("first calls", columns, rows, (note,))
