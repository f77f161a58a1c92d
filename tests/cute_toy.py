"""A kernel of CuTe DSL, in a module of its own: it reads annotations as objects, which ``annotations`` would make text."""

import cutlass
from cutlass import cute


@cute.kernel
def kernel(a: cutlass.Int32):
    cute.printf("{}", a)


@cute.jit
def launch(a: cutlass.Int32):
    kernel(a).launch(grid=(1, 1, 1), block=(1, 1, 1))
