"""Records of what is to be warmed, for which device and libraries, and what a warmup did."""

from __future__ import annotations

import hashlib
import re
from typing import Any, cast

import msgspec

from passes.records import SCHEMA, Document, Gap, KernelCall, Record, ShapeSet, Specialization
from passes.table import Table, plural, size
from passes.text import fold, shapes_text

_ENTRY = re.compile(r"(?!\.)[A-Za-z0-9._+-]{1,255}")


class Target(Record, frozen=True):
    """The device planned for: what of it enters the choice of a kernel."""

    name: str
    device: str = "cuda"
    """"cuda" or "cpu"."""
    arch: str = ""
    """The compilers' name of the architecture, as in "sm_90a"; empty on a CPU."""
    num_sms: int = 132
    """Streaming multiprocessors. "cpu" counts 132, so that rules over SMs give their real image in tests."""
    smem: int = 232448
    """Shared memory that one block may use, in bytes."""

    @classmethod
    def named(cls, name: str) -> Target:
        """Return a target by name, for a machine that need not have it.

        Raises UnknownTargetError with the nearest names.
        """
        from fxwarm import devices

        return devices.named(name)

    @classmethod
    def current(cls, device: Any = None) -> Target:
        """Return the target of ``device``, by default the current CUDA device, or the CPU where there is none."""
        from fxwarm import devices

        return devices.current(device)


class Library(Record, frozen=True):
    """One build of a kernel library: what is installed, or what was named for planning."""

    distribution: str
    version: str
    """The distribution's full version. ``module.__version__`` is no identity."""
    installed: bool = False
    module: str = ""
    """The import name it was found under; empty when it is not installed."""
    fingerprint: str = ""
    """Digest of whatever else makes its binaries: headers, install path, compiler text, as its family sees fit."""
    settings: tuple[tuple[str, str], ...] = ()
    """Run-time settings that enter its kernels (``num_sms``, alignment), as text, sorted."""
    environment: tuple[tuple[str, str], ...] = ()
    """Environment variables that enter its kernels and are set, sorted."""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


class CompileKey(Record, frozen=True, order=True):
    """The name of exactly one binary (or one tuned entry) of a library. Scalars only."""

    family: str
    kernel: str
    template: tuple[str, ...] = ()
    """What specialises the kernel, as text in the library's own order; empty where a library has none."""
    tag: str = ""
    """The name the library itself gives this kind of kernel (in its cache, in its logs), where it has one."""

    def __str__(self) -> str:
        return f"{self.kernel}<{', '.join(self.template)}>" if self.template else self.kernel


class Source(Record, frozen=True):
    """What the library asked its compiler for: enough to build the entry without the library."""

    entry: str
    """Name of the entry in the library's cache, relative to it."""
    code: str
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _ENTRY.fullmatch(self.entry):  # it becomes a path
            raise ValueError(f"{self.entry!r} is no name of a cache entry")


class Planned(Record, frozen=True, eq=False):
    """A key, the smallest call that makes the library pick it, and, once recorded, its source.

    Two are equal when their keys are: a modelled and a recorded plan of the same kernel agree.
    """

    key: CompileKey
    witness: KernelCall | None = None
    """A static call. None for a kernel that no call of ours reaches (registered by hand)."""
    source: Source | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Planned) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


class WarmPlan(Document, frozen=True):
    """Which kernels a range of calls can need on a target, with these libraries."""

    target: Target
    libraries: tuple[Library, ...] = ()
    planned: tuple[Planned, ...] = ()
    gaps: tuple[Gap, ...] = ()
    reference: tuple[str, ...] = ()
    """Ops that run as reference implementations on this target: nothing to warm, and no gap."""
    notes: tuple[str, ...] = ()
    """What a reader should know and what is no gap: drift between model and library, M in a key."""
    shapes: ShapeSet = ShapeSet()
    """What the plan was made from."""
    graph_key: str = ""
    """torch.compile's cache key of the graph, or a digest where torch gives none; empty for a plan of several."""
    kind: str = "fxwarm.WarmPlan"
    schema: int = SCHEMA

    @property
    def keys(self) -> tuple[CompileKey, ...]:
        """The planned keys, each once."""
        return tuple(p.key for p in self.planned)

    @property
    def is_complete(self) -> bool:
        """Whether the plan covers all that the graph can ask for."""
        return not self.gaps

    def __len__(self) -> int:
        return len(self.planned)

    def table(self) -> Table:
        """Return the plan as a table: a row a kernel, with its witness."""
        rows, common = [], []
        groups: dict[tuple[str, str, str], list[Planned]] = {}
        for p in self.planned:
            op = p.witness.op if p.witness else "by hand"
            groups.setdefault((p.key.family, p.key.kernel, op), []).append(p)
        families = {family for family, _, _ in groups}
        for (family, kernel, op), group in groups.items():
            templates, pattern = fold([p.key.template for p in group])
            if pattern:
                common.append(f"{kernel}<{pattern}>; the table shows the *")
            for place, (p, template) in enumerate(zip(group, templates, strict=True)):
                names = [*dict.fromkeys((kernel, op)), *([family] if len(families) > 1 else [])]
                head = (
                    "\n".join(names[place:])
                    if place == len(group) - 1
                    else "".join(names[place : place + 1])
                )
                rows.append((head, template, shapes_text(p.witness) if p.witness else ""))
        libraries = ", ".join(map(str, self.libraries)) or "no library"
        title = f"{plural(len(self), 'kernel')} for {self.target.name} ({self.target.num_sms} SMs) with {libraries}"
        notes = (
            common + [f"gap: {gap}" for gap in self.gaps] + [f"note: {note}" for note in self.notes]
        )
        if self.reference:
            notes.append(f"reference implementation here: {', '.join(self.reference)}")
        return Table(title, ("kernel, op", "template|", "smallest call"), rows, notes)


class Built(Record, frozen=True):
    """One kernel that was put into the library's cache, or could not be."""

    key: CompileKey
    seconds: float = 0.0
    bytes: int = 0
    """Size of the binary."""
    error: str = ""
    """The compiler's own words; empty on success."""


class Loaded(Record, frozen=True):
    """One kernel that was made resident, or could not be."""

    key: CompileKey
    seconds: float = 0.0
    error: str = ""


class Tuned(Record, frozen=True):
    """One entry of a tuning table that was measured, found, or could not be."""

    key: CompileKey
    seconds: float = 0.0
    found: bool = False
    """Whether it was read from a stored table instead of measured."""
    error: str = ""


class Entry(Record, frozen=True):
    """One file of a library's cache that a plan stands on."""

    path: str
    bytes: int
    sha256: str = ""


class WarmReport(Document, frozen=True):
    """What one warmup built, found, loaded, tuned and missed."""

    plan_key: str
    target: Target
    libraries: tuple[Library, ...] = ()
    built: tuple[Built, ...] = ()
    found: tuple[CompileKey, ...] = ()
    """Kernels that the library's cache already held."""
    loaded: tuple[Loaded, ...] = ()
    tuned: tuple[Tuned, ...] = ()
    gaps: tuple[Gap, ...] = ()
    reference: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    """Libraries that the plan names and this machine lacks."""
    notes: tuple[str, ...] = ()
    """What a reader should know and what is no gap."""
    specialized: tuple[Specialization, ...] = ()
    """Sizes that the model fixed while it was traced, and the lines that did it: other sizes are traced anew."""
    entries: tuple[Entry, ...] = ()
    """The files that hold the kernels, with sizes and hashes: what the next start checks before it believes this."""
    skipped: str = ""
    """Why nothing was done, where nothing was (switched off, already warm)."""
    seconds: float = 0.0
    build_seconds: float = 0.0
    """Wall time of the builds, part of it hidden behind Inductor's own compile."""
    peak_bytes: int = 0
    """Device memory at the highest point of the warmup above what was there before."""
    kept_bytes: int = 0
    """Device memory that is still held after it: the libraries' own workspaces."""
    kind: str = "fxwarm.WarmReport"
    schema: int = SCHEMA

    @property
    def steps(self) -> tuple[Built | Loaded | Tuned, ...]:
        """Everything that was tried, in the order of the fields."""
        return cast("tuple[Built | Loaded | Tuned, ...]", (*self.built, *self.loaded, *self.tuned))

    @property
    def failed(self) -> tuple[Built | Loaded | Tuned, ...]:
        """What was tried and went wrong."""
        return tuple(x for x in self.steps if x.error)

    @property
    def status(self) -> str:
        """``complete``, ``partial`` (something failed or is a gap), or ``off``."""
        if self.skipped == "off":
            return "off"
        return "partial" if self.failed or self.gaps or self.absent else "complete"

    def table(self) -> Table:
        """Return the report as a table: a row a library and step."""
        rows = []
        for family in dict.fromkeys(x.key.family for x in self.steps) | dict.fromkeys(
            key.family for key in self.found
        ):
            for name, items in (
                ("built", self.built),
                ("tuned", self.tuned),
                ("loaded", self.loaded),
            ):
                mine = [x for x in items if x.key.family == family]
                if mine:
                    good = [x for x in mine if not x.error]
                    seconds, worst = sum(x.seconds for x in mine), max(x.seconds for x in mine)
                    volume = (
                        size(sum(x.bytes for x in good if isinstance(x, Built)))
                        if name == "built"
                        else ""
                    )
                    rows.append(
                        (
                            family,
                            name,
                            str(len(good)),
                            str(len(mine) - len(good)),
                            f"{seconds:.2f}",
                            f"{worst:.2f}",
                            volume,
                        )
                    )
            found = sum(key.family == family for key in self.found)
            if found:
                rows.append((family, "found", str(found), "", "", "", ""))
        title = f"warmup {self.status} on {self.target.name} in {self.seconds:.2f} s"
        notes = [f"failed: {x.key}: {x.error}" for x in self.failed]
        notes += [f"gap: {gap}" for gap in self.gaps] + [f"absent: {a}" for a in self.absent]
        notes += [f"note: {note}" for note in self.notes]
        notes += [
            f"fixed while tracing: {s.source} = {s.size} at {s.place or 'an unknown line'}"
            for s in self.specialized
        ]
        if self.reference:
            notes.append(f"reference implementation here: {', '.join(self.reference)}")
        if self.peak_bytes:
            notes.append(
                f"device memory: {size(self.peak_bytes)} at the peak, {size(self.kept_bytes)} kept by the libraries"
            )
        columns = ("family", "step", "done>", "failed>", "sum s>", "slowest s>", "size>")
        return Table(title, columns, rows, notes)


def digest(*parts: object) -> str:
    """Return 32 hex digits that name ``parts``, records or plain JSON values: sha256 over their JSON."""
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]
