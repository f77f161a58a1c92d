"""The functions that an expression over sizes may call: what builds each, and what computes it on arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

COMPARISONS = ("Eq", "Ne", "Lt", "Le", "Gt", "Ge")


@functools.cache
def vocabulary() -> SimpleNamespace:
    """Return what a text may call: ``make`` builds the expression, ``run`` computes it on arrays.

    Imported on first use: sympy alone costs about a second after torch.
    """
    import numpy as np
    import sympy
    from torch.utils._sympy import functions as of_torch

    def integral(rounded: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda x: rounded(x).astype(np.int64)

    run = {
        "FloorDiv": np.floor_divide,
        "CleanDiv": np.floor_divide,
        "Mod": np.mod,
        "PythonMod": np.mod,
        "ModularIndexing": lambda base, divisor, modulus: np.mod(base // divisor, modulus),
        "Max": lambda *a: functools.reduce(np.maximum, a),
        "Min": lambda *a: functools.reduce(np.minimum, a),
        "PowByNatural": np.power,
        "ToFloat": lambda x: np.asarray(x, np.float64),
        "IntTrueDiv": np.true_divide,
        "FloatTrueDiv": np.true_divide,
        "CeilToInt": integral(np.ceil),
        "FloorToInt": integral(np.floor),
        "TruncToInt": integral(np.trunc),
        "RoundToInt": integral(np.rint),
        "TruncToFloat": np.trunc,
        "Where": np.where,
        "ceiling": np.ceil,
        "floor": np.floor,
        "Abs": np.abs,
        "And": lambda *a: functools.reduce(np.logical_and, a),
        "Or": lambda *a: functools.reduce(np.logical_or, a),
        "Not": np.logical_not,
    }
    # torch's own where it has one; a version that lacks one never writes it
    make = {name: getattr(of_torch, name, None) or getattr(sympy, name, None) for name in run}
    make |= {"CleanDiv": of_torch.FloorDiv, "Identity": lambda x: x}
    make = {name: made for name, made in make.items() if made is not None}
    make.update({name: getattr(sympy, name) for name in COMPARISONS})
    return SimpleNamespace(make=make, run=run)
