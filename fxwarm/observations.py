"""Shapes of code that no tracer can follow: run it once, eagerly, and keep the kernel calls that it really made.

    with fxwarm.observe() as seen:
        model(torch.randn(1009, 2048, device="cuda"))     # 1009 tokens: a number that no weight has
    seen.shapes()                                         # what ran: M = 1009
    seen.shapes(T=(1009, 1, 8192), rows=["8*T + Min(8*T, 128)*127"])   # what will: M = T, and rows of the experts

Custom ops are seen by the dispatcher, plain functions of the libraries through a stand-in in every module that holds
them; both are called as before. One run says nothing of other sizes, so a size stays a number unless declared.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fxwarm import exc
from passes.records import Gap, KernelCall, ShapeSet, Site, UnknownOp, unite

if TYPE_CHECKING:
    from passes.calls import Bounder

__all__ = ["Observed", "observe"]


class Observed:
    """The kernel calls of an eager run, as they were made. Grows while ``observe`` is on."""

    def __init__(self) -> None:
        self._calls: dict[tuple[Any, ...], list[Any]] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def shapes(self, *, rows: Sequence[str] = (), **sizes: tuple[int, int, int]) -> ShapeSet:
        """Return the kernel calls; the sizes declared are ranges, the rest are the numbers that were seen.

        ``T=(1009, 1, 8192)`` says that 1009 was the number of tokens T, which ranges over 1..8192; ``rows`` are further
        sizes that follow from them, as text over T. A dim (or integer argument) that equals one at T=1009 becomes it.

        Raises ValueError where a declared number may as well be a weight's size, two expressions have one value, or
        one was seen nowhere.
        """
        from fxwarm.family import load_families

        declared = _Declared(sizes, rows)
        matchers = [family.match for family in load_families().values()]
        out = []
        bounder = declared.bounder()
        for (namespace, name, arguments, place), (count, overload) in self._calls.items():
            given = {key: declared.generalise(value) for key, value in arguments}
            out.append(_match(matchers, namespace, name, given, overload, place, bounder, count))
        declared.check_seen()
        return unite(out)

    def note(
        self, namespace: str, name: str, arguments: Mapping[str, Any], overload: Any = None
    ) -> None:
        """Note one call. ``arguments`` hold real tensors; only their dtypes, shapes and strides are kept."""
        kept = tuple((key, _keep(value)) for key, value in arguments.items())
        key = namespace, name, kept, _place()
        self._calls.setdefault(key, [0, overload])[0] += 1


@contextlib.contextmanager
def observe() -> Iterator[Observed]:
    """Record the kernel calls that this thread makes until the end of the block."""
    from torch.utils._python_dispatch import TorchDispatchMode

    import fxwarm.ops  # noqa: F401
    from passes.arguments import bind
    from passes.flatten import BUILTIN

    seen = Observed()
    inside = threading.local()  # an op that calls the library is one call, not two

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            outermost = not getattr(inside, "value", False)
            if func.namespace in BUILTIN:
                return func(*args, **kwargs)
            if outermost:
                seen.note(
                    func.namespace,
                    func._schema.name.partition("::")[2],
                    bind(func, args, kwargs),
                    func,
                )
            inside.value = True
            try:
                return func(*args, **kwargs)
            finally:
                inside.value = not outermost

    with _stand_ins(seen, inside), Mode():
        yield seen


@contextlib.contextmanager
def _stand_ins(seen: Observed, inside: threading.local) -> Iterator[None]:
    """Put a stand-in for each function of a library into every module that holds it; put them back at the end."""
    from fxwarm.ops import _library
    from fxwarm.substitute import functions

    thread = threading.get_ident()

    def stand_in(known: functions.Substitute) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            outermost = not getattr(inside, "value", False) and threading.get_ident() == thread
            if not outermost:
                return known.function(*args, **kwargs)
            _note(seen, known, args, kwargs)
            inside.value = True
            try:
                return known.function(*args, **kwargs)
            finally:
                inside.value = False

        with contextlib.suppress(Exception):
            functools.update_wrapper(call, known.function)
        return call

    known = {i: (k, stand_in(k)) for i, k in functions.find_substitutes().items()}
    changed: list[tuple[dict[str, Any], str, Any]] = []
    for module in list(sys.modules.values()):
        if not isinstance(module, types.ModuleType):
            continue
        if module.__name__.partition(".")[0] in ("fxwarm", "passes"):
            continue
        held = vars(module)
        for name, value in list(held.items()):
            found = known.get(id(value))
            if found is not None and found[0].function is value:
                changed.append((held, name, value))
                held[name] = found[1]
    try:
        yield
    finally:
        for held, name, value in changed:
            held[name] = value
        for function in _library._functions:  # an op may have looked its function up meanwhile
            function.forget()


def _note(seen: Observed, known: Any, args: Any, kwargs: Any) -> None:
    """Note a call of a library's function under the names of its op."""
    from fxwarm.substitute import functions

    try:
        named, _ = functions.bind(
            known,
            args,
            kwargs,
            constant=lambda value: value,
            unpack=lambda value: value if isinstance(value, (tuple, list)) else (),
        )
    except functions.Refused as refused:
        seen.note(known.library, known.name, {"": str(refused)})
        return
    seen.note(known.library, known.op or known.name, named)


def _match(  # noqa: PLR0917
    matchers: Sequence[Any],
    namespace: str,
    name: str,
    arguments: Mapping[str, Any],
    overload: Any,
    place: str,
    bounder: Bounder,
    count: int,
) -> ShapeSet:
    from passes.flatten import OpCall

    if "" in arguments:
        return ShapeSet(gaps=(Gap(f"{namespace}.{name}", str(arguments[""]), place),))
    op = OpCall(namespace, name, arguments, overload, place, bounder)
    calls: list[KernelCall] = []
    gaps: list[Gap] = []
    for matcher in matchers:
        try:
            for found in matcher(op):
                if isinstance(found, Gap):
                    gaps.append(found)
                else:
                    calls.append(found)
        except ValueError as error:
            gaps.append(Gap(op.qualified_name, str(error), place))
    unknown = () if calls or gaps else (UnknownOp(op.qualified_name, count, place),)
    distinct = tuple(dict.fromkeys(calls))
    return ShapeSet(distinct, tuple(Site(count, place) for _ in distinct), tuple(gaps), unknown)


class _Declared:
    """The sizes that a user declares to be ranges."""

    def __init__(self, sizes: Mapping[str, tuple[int, int, int]], rows: Sequence[str]) -> None:
        from passes import expr

        self.ranges: dict[Any, Any] = {}
        self.texts: dict[int, str] = {}
        self.exprs: dict[int, Any] = {}
        self._seen: set[int] = set()
        numbers: dict[Any, int] = {}
        for name, (observed, lower, upper) in sizes.items():
            if not lower <= observed <= upper:
                raise exc.OptionError(
                    f"{name} was {observed}, outside {lower}..{upper}; give (seen, lowest, highest)"
                )
            if observed < 2 or observed % 8 == 0:
                raise exc.OptionError(
                    f"{name} was {observed}, which may as well be the size of a weight; "
                    "run with a number that is no multiple of 8, such as 1009"
                )
            numbers[expr.symbol(name)] = observed
            self.ranges[expr.symbol(name)] = _range(lower, upper)
        for text in (*sizes, *rows):
            parsed = expr.parse(text)
            if free := parsed.free_symbols - numbers.keys():
                raise exc.OptionError(
                    f"{text} mentions {', '.join(sorted(map(str, free)))}; declare it as "
                    f"{min(map(str, free))}=(seen, lowest, highest)"
                )
            value = int(parsed.xreplace({s: _number(n) for s, n in numbers.items()}))
            if value in self.texts and self.exprs[value] != parsed:
                raise exc.OptionError(
                    f"{text} and {self.texts[value]} are both {value} in this run; "
                    "run with another number of tokens"
                )
            self.texts[value], self.exprs[value] = text, parsed

    def bounder(self) -> Bounder:
        from passes.calls import Bounder
        from passes.sizes import Sizes

        return Bounder(Sizes(ranges=self.ranges))

    def generalise(self, value: Any) -> Any:
        """Return ``value`` with each declared number replaced by its expression."""
        import dataclasses

        from passes.calls import SymTensor

        if isinstance(value, tuple):
            return tuple(map(self.generalise, value))
        if type(value) is int:
            return self._size(value)
        if not isinstance(value, SymTensor):
            return value
        shape = tuple(map(self._size, value.shape))
        if value.strides is None or shape == value.shape:
            return dataclasses.replace(value, shape=shape)
        return dataclasses.replace(
            value, shape=shape, strides=tuple(map(self._stride, value.strides))
        )

    def check_seen(self) -> None:
        """Raise OptionError for a declared size that no call had."""
        for value, text in self.texts.items():
            if value not in self._seen:
                raise exc.OptionError(
                    f"no kernel call had a size of {text} = {value}; look at shapes() without arguments"
                )

    def _size(self, size: int) -> Any:
        if size not in self.exprs:
            return size
        self._seen.add(size)
        return self.exprs[size]

    def _stride(self, stride: int) -> Any:
        from passes import expr

        for value, found in self.exprs.items():
            if stride == value:
                return found
            if stride == -(-value // 4) * 4:  # scales whose columns TMA wants 16 bytes apart
                return expr.parse(f"4*(({self.texts[value]} + 3)//4)")
        return stride


def _number(number: int) -> Any:
    """Return a number as sympy's."""
    import sympy

    return sympy.Integer(number)


def _range(lower: int, upper: int) -> Any:
    from torch.utils._sympy.value_ranges import ValueRanges

    return ValueRanges(_number(lower), _number(upper))


def _keep(value: Any) -> Any:
    """Return an argument as a record can be made of it: a tensor becomes its dtype, shape and strides."""
    import torch

    from passes.bound import is_contiguous
    from passes.calls import SymTensor

    if isinstance(value, torch.Tensor):
        shape, strides = tuple(map(int, value.shape)), tuple(map(int, value.stride()))
        dtype = str(value.dtype).removeprefix("torch.")
        return SymTensor(
            dtype, shape, None if is_contiguous(shape, strides) else strides, value.device.type
        )
    if isinstance(value, (tuple, list)):
        return tuple(map(_keep, value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return int(value) if isinstance(value, int) and not isinstance(value, bool) else value
    return str(value)


def _place() -> str:
    """Return the innermost line of the user's."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] not in ("fxwarm", "passes", "torch", "deep_gemm", "flashinfer"):
            file = frame.f_code.co_filename.replace("\\", "/").rpartition("/")[2]
            return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
