"""TileLang kernels for the tests: one that works, some that cannot be elaborated, one in eager style."""

import os
import sys
import time
from pathlib import Path

import tilelang
from tilelang import language as T


@tilelang.jit(target="c", execution_backend="cython")
def scaled(width: int, factor: float, step: int = 1):
    n = T.dynamic("n")

    @T.prim_func
    def scaled_kernel(x: T.Tensor[(n, width), T.float32], out: T.Tensor[(n, width), T.float32]):
        with T.Kernel(n) as t:
            for i in T.serial(width):
                out[t, i] = x[t, i] * factor + step

    return scaled_kernel


@tilelang.jit(target="c", execution_backend="cython")
def counted(width: int, folder: str):
    """Leave a file in ``folder`` that says how many of these are being built at once."""
    mine = Path(folder, f"{width}.running")
    mine.touch()
    time.sleep(0.3)
    Path(folder, f"{width}.seen").write_text(str(len(list(Path(folder).glob("*.running")))))
    mine.unlink()
    n = T.dynamic("n")

    @T.prim_func
    def counted_kernel(x: T.Tensor[(n, width), T.float32], out: T.Tensor[(n, width), T.float32]):
        with T.Kernel(n) as t:
            for i in T.serial(width):
                out[t, i] = x[t, i]

    return counted_kernel


@tilelang.jit(target="c", execution_backend="cython")
def broken(width: int):
    raise ValueError(f"no kernel of width {width}")


@tilelang.jit(target="c", execution_backend="cython")
def deadly(width: int):
    print("no memory left", file=sys.stderr, flush=True)
    os._exit(3)


@tilelang.jit(target="c", execution_backend="cython")
def endless(width: int):
    time.sleep(600)


@tilelang.jit(target="c", execution_backend="cython")
def eager(x, out, width: int, factor: float):
    n = T.dynamic("n")
    x: T.Tensor[[n, width], T.float32]
    out: T.Tensor[[n, width], T.float32]
    with T.Kernel(n) as t:
        for i in T.serial(width):
            out[t, i] = x[t, i] * factor
