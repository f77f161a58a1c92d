"""The hook in Dynamo: private API of torch (2.11 to 2.14), all of it here and guarded.

Dynamo makes a variable of each object that traced code touches. For a function of a library (``functions``) met while
tracing for fxwarm, the variable's class is narrowed to one whose call puts our op into the graph; everything else about
it stays, so comparing, storing or passing the function on works as before.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch

from fxwarm.substitute import functions
from fxwarm.substitute.functions import UNKNOWN, Refused, Substitute

log = logging.getLogger(__name__)

MARK = "_fxwarm_sees_calls"
"""Attribute of a backend for which calls become visible."""

try:
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.utils import proxy_args_kwargs
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.builder import VariableBuilder

    _wrap = VariableBuilder._wrap
except (
    ImportError,
    AttributeError,
) as _error:  # calls of plain functions break the graph, as without us
    log.info("plain library calls stay invisible on torch %s: %s", torch.__version__, _error)
    VariableBuilder = None  # type: ignore[assignment,misc]

_TABLE = "_fxwarm_substitutes"
_WRAPPERS = ("_torchdynamo_orig_backend", "compiler_fn", "func", "__wrapped__")
_classes: dict[tuple[type, int], type] = {}


def install() -> bool:
    """Hook Dynamo; return whether that was possible."""
    if VariableBuilder is None:
        return False
    setattr(VariableBuilder, "_wrap", _wrap_visible)  # noqa: B010  (a method, to the type checker)
    return True


def remove() -> None:
    """Unhook Dynamo."""
    if VariableBuilder is not None and VariableBuilder._wrap is _wrap_visible:
        setattr(VariableBuilder, "_wrap", _wrap)  # noqa: B010
    _classes.clear()


def is_ours(backend: Any) -> bool:
    """Return whether ``backend``, in whatever torch or functools wrapped it, is one of fxwarm's."""
    for _ in range(16):
        if backend is None:
            return False
        if getattr(backend, MARK, False):
            return True
        backend = next(
            (inner for n in _WRAPPERS if (inner := getattr(backend, n, None)) is not None), None
        )
    return False


def _wrap_visible(self: Any, value: Any) -> Any:
    made = _wrap(self, value)
    try:
        known = _table_of(self.tx.output).get(id(value))
        if known is not None and known.function is value:
            if not isinstance(
                value, type(install)
            ):  # a Python function is guarded by its code already
                self.install_guards(GuardBuilder.ID_MATCH)
            made.__class__ = _visible_class(type(made), known)
    except Exception as error:  # the user's compile matters more than our view of it
        log.warning("a library call may stay invisible: %s: %s", type(error).__name__, error)
    return made


def _table_of(output: Any) -> dict[int, Substitute]:
    """Return the substitutes for the frame being traced: none for another backend; anew after an import."""
    known = output.__dict__.get(_TABLE)
    if known is None or (known[0] and known[0] != len(sys.modules)):
        ours = is_ours(output.compiler_fn)
        known = (len(sys.modules), functions.find_substitutes()) if ours else (0, {})
        output.__dict__[_TABLE] = known
    table: dict[int, Substitute] = known[1]
    return table


def _visible_class(base: type, known: Substitute) -> type:
    key = base, id(known.function)
    if key not in _classes or _classes[key].known.function is not known.function:  # type: ignore[attr-defined]

        def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            try:
                return _call_op(known, tx, list(args), dict(kwargs))
            except Refused as refused:
                functions.refuse(known, str(refused), _place(tx))
            return base.call_function(self, tx, args, kwargs)  # type: ignore[attr-defined]

        members = {
            "known": known,
            "call_function": call_function,
            # Dynamo compares by exact class, which the narrower one is not (torch 2.13)
            "get_real_python_backed_value": lambda self: known.function,
        }
        _classes[key] = type(base.__name__, (base,), members)
    return _classes[key]


def _call_op(known: Substitute, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Put the op into the graph; raise Refused, with nothing done, where it cannot stand for the call."""
    if not known.op:
        raise Refused(known.reason)
    functions.check_build(known)

    def unpack(value: Any) -> Any:
        try:
            return value.unpack_var_sequence(tx)
        except Exception:
            return ()

    named, output = functions.bind(known, args, kwargs, _constant, unpack)
    packet = getattr(torch.ops.fxwarm, known.op)
    build = VariableTracker.build
    if known.op == "cutlass_fused_moe" and _constant(named.get("quant_scales")) is None:
        named["quant_scales"] = build(tx, [])
    for name in ("activation_type", "routing_method_type", "weight_layout"):
        if isinstance(member := _constant(named.get(name)), int):
            named[name] = build(tx, int(member))  # of an enum, in the library's own words
    schema = packet.default._schema.arguments
    first = [a.name for a in schema if not a.has_default_value()]
    if missing := [n for n in first if n not in named]:
        raise Refused(f"it lacks {', '.join(missing)}")
    order = [named.pop(n) for n in first]
    _try(known, packet, order, named)
    made = build(tx, packet).call_function(tx, order, named)
    if output is not None:
        made = output.call_method(tx, "copy_", [made], {})
    return build(tx, [None]).clone(items=[made]) if known.wraps else made


def _try(known: Substitute, packet: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Run the op's fake on the call's own fake tensors. Raises Refused with what it finds wrong."""
    gradients = False

    def example(value: Any) -> Any:
        return value.node.meta["example_value"] if isinstance(value, torch.fx.Proxy) else value

    try:
        fake_args, fake_kwargs = torch.fx.node.map_aggregate(
            proxy_args_kwargs(args, kwargs), example
        )
        if known.has_gradient and torch.is_grad_enabled():
            leaves = torch.utils._pytree.tree_leaves((fake_args, fake_kwargs))
            gradients = any(isinstance(v, torch.Tensor) and v.requires_grad for v in leaves)
        with torch.no_grad():
            packet(*fake_args, **fake_kwargs)
    except Exception as error:
        raise Refused(str(error).strip().partition("\n")[0] or type(error).__name__) from error
    if gradients:
        raise Refused("its gradient is the library's own; call it under torch.no_grad() to warm it")


def _constant(value: Any) -> Any:
    if value is None:
        return None
    try:
        return value.as_python_constant() if value.is_python_constant() else UNKNOWN
    except Exception:
        return UNKNOWN


def _place(tx: Any) -> str:
    summary = tx.frame_summary() if hasattr(tx, "frame_summary") else None
    if summary is None:
        return ""
    return f"{summary.filename.replace(chr(92), '/').rpartition('/')[2]}:{summary.lineno} in {summary.name}"
