"""Every setting of fxwarm in one frozen record: option over environment over default.

In code ``options={"fxwarm.max_size": 4096}``, in the environment ``FXWARM_MAX_SIZE=4096``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Literal, get_args

import msgspec

from fxwarm import exc

Coverage = Literal["exact", "full", "off"]
When = Literal["first_call", "load", "manual"]
Symbolic = Literal["dynamic", "unbacked", "off"]
Monitor = Literal["off", "count", "warn", "raise"]

PREFIX = "fxwarm."
ENV = "FXWARM_"


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a user can set. Each field is ``fxwarm.<name>`` in options and ``FXWARM_<NAME>`` in the environment."""

    max_size: int = 8192
    """Bound of each unbounded input size, and of each product of one input's leading sizes (batch*seq)."""
    coverage: Coverage = "exact"
    """"exact": the distinct kernels, each launched once. "full": also launch every attainable M. "off": no warmup."""
    when: When = "first_call"
    """"first_call": before the first result. "load": builds start when an artifact is loaded. "manual": warm_all()."""
    strict: bool = False
    """Raise when something could not be warmed, instead of reporting it and running the model."""
    symbolic: Symbolic = "dynamic"
    """How the batch is made symbolic on the first call. "unbacked" gives one graph for batch 1 too."""
    jobs: int = 0
    """Compiles at the same time; 0 takes as many as this process may use CPUs."""
    memory: int = 0
    """Bytes of device memory that a warmup may use at once; 0 takes half of what is free."""
    build_timeout: float = 300.0
    """Seconds after which one compile is given up, by name."""
    max_keys: int = 4096
    """Most kernels that one plan may hold; beyond it the plan says how many it leaves out."""
    embed: bool = False
    """``aot_compile`` artifacts import fxwarm where they are loaded, and packages hold an op that warms them: both are
    then warm where torch alone loads them, and fail where fxwarm is not installed."""
    jit_ops: tuple[str, ...] = ()
    """Custom ops that compile at run time and that no family knows: each is a gap."""
    monitor: Monitor = "off"
    """What to do about JIT work after warmup."""
    learn: bool = False
    """Add what the monitor saw to the stored plan, so that the next start covers it."""
    cache_dir: str = ""
    """Folder of plans and receipts; empty is beside Inductor's cache."""

    def __post_init__(self) -> None:
        for name, least in (("max_size", 1), ("jobs", 0), ("memory", 0), ("max_keys", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise exc.OptionError(
                    f"{PREFIX}{name} is {value!r}; give a whole number of at least {least}"
                )


NAMES = Options.__struct_fields__

_active: ContextVar[Options | None] = ContextVar("fxwarm_options", default=None)


def active() -> Options:
    """Return the settings of the warmup that runs here, else those of the environment."""
    return _active.get() or resolve()


def is_active() -> bool:
    """Return whether a warmup runs in this thread: what libraries do meanwhile is its work."""
    return _active.get() is not None


@contextlib.contextmanager
def use(options: Options) -> Iterator[None]:
    """Make ``options`` the active ones inside, in this thread."""
    token = _active.set(options)
    try:
        yield
    finally:
        _active.reset(token)


def resolve(
    options: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ
) -> Options:
    """Return the settings of one compile from its ``fxwarm.*`` options (prefix optional) and the environment.

    Raises OptionError for an unknown name or an impossible value, naming it and what is possible.
    """
    values: dict[str, Any] = {}
    for name in NAMES:
        text = environ.get(f"{ENV}{name.upper()}")
        if text is not None:
            values[name] = _convert(name, text, f"{ENV}{name.upper()}", strict=False)
    for key, value in (options or {}).items():
        name = key.removeprefix(PREFIX)
        if name not in NAMES:
            raise exc.OptionError(
                f"unknown option {key!r}; {exc.did_you_mean(key, [PREFIX + n for n in NAMES])}"
            )
        values[name] = _convert(name, value, PREFIX + name, strict=True)
    return Options(**values)


def split(options: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (fxwarm's options, Inductor's options) of the dict that the user gave to torch.compile."""
    ours = {k: v for k, v in (options or {}).items() if k.startswith(PREFIX)}
    theirs = {k: v for k, v in (options or {}).items() if k not in ours}
    return ours, theirs


def _convert(name: str, value: Any, shown: str, *, strict: bool) -> Any:
    field = next(f for f in msgspec.structs.fields(Options) if f.name == name)
    if not strict and name == "jit_ops":
        value = [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, (list, set, frozenset)):
        value = tuple(value)
    try:
        return msgspec.convert(value, field.type, strict=strict)
    except msgspec.ValidationError:
        choices = get_args(field.type)
        want = (
            " or ".join(map(repr, choices))
            if choices and all(isinstance(c, str) for c in choices)
            else f"a {getattr(field.type, '__name__', 'tuple of op names')}"
        )
        raise exc.OptionError(f"{shown} is {value!r}; give {want}") from None
