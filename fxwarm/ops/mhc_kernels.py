# mypy: ignore-errors
# ruff: noqa: PLR0912, PLR0917
"""TileLang kernels of our own for a CPU: what the fused mHC kernels do on a GPU, specialised by the same statics.

They are why a machine without a GPU meets the same JIT: a token count with another number of splits compiles another
kernel. float32 throughout, since TileLang's target "c" has no bfloat16 and no fragments (0.1.15). Annotations are
evaluated by TileLang while it traces: no ``from __future__ import annotations`` here.
"""

import tilelang
from tilelang import language as T


@tilelang.jit(target="c", execution_backend="cython")
def mhc_pre_big_fuse_cpu(
    hidden_size: int,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int,
    mhc_mult: int,
):
    """Reduce the partial sums, then split, Sinkhorn and the weighted sum of the streams, one token at a time."""
    n = T.dynamic("num_tokens")
    m = mhc_mult
    columns = m * (2 + m)

    @T.prim_func
    def mhc_pre_big_fuse_cpu_kernel(
        partial: T.Tensor[(n_splits, n, columns), T.float32],
        squares: T.Tensor[(n_splits, n), T.float32],
        scale: T.Tensor[(3,), T.float32],
        base: T.Tensor[(columns,), T.float32],
        residual: T.Tensor[(n, m, hidden_size), T.float32],
        post: T.Tensor[(n, m), T.float32],
        comb: T.Tensor[(n, m * m), T.float32],
        layer_input: T.Tensor[(n, hidden_size), T.float32],
    ):
        with T.Kernel(n) as t:
            mix = T.alloc_local((2 * m,), T.float32)
            c = T.alloc_local((m, m), T.float32)
            acc = T.alloc_local((2,), T.float32)  # a scratch sum, and what must outlive it

            acc[0] = 0.0
            for s in T.serial(n_splits):
                acc[0] += squares[s, t]
            acc[1] = T.rsqrt(acc[0] / (m * hidden_size) + rms_eps)
            for j in T.serial(2 * m):
                acc[0] = 0.0
                for s in T.serial(n_splits):
                    acc[0] += partial[s, t, j]
                mix[j] = acc[0] * acc[1]
            for j in T.serial(m):
                for k in T.serial(m):
                    acc[0] = 0.0
                    for s in T.serial(n_splits):
                        acc[0] += partial[s, t, 2 * m + j * m + k]
                    c[j, k] = acc[0] * acc[1] * scale[2] + base[2 * m + j * m + k]

            for j in T.serial(m):
                mix[j] = T.sigmoid(mix[j] * scale[0] + base[j]) + mhc_pre_eps
                post[t, j] = T.sigmoid(mix[m + j] * scale[1] + base[m + j]) * mhc_post_mult_value
            for i in T.serial(hidden_size):
                acc[0] = 0.0
                for j in T.serial(m):
                    acc[0] += mix[j] * residual[t, j, i]
                layer_input[t, i] = acc[0]

            for j in T.serial(m):  # softmax over each row
                acc[0] = c[j, 0]
                for k in T.serial(m):
                    acc[0] = T.max(acc[0], c[j, k])
                acc[1] = 0.0
                for k in T.serial(m):
                    c[j, k] = T.exp(c[j, k] - acc[0])
                    acc[1] += c[j, k]
                for k in T.serial(m):
                    c[j, k] = c[j, k] / acc[1] + mhc_sinkhorn_eps
            for r in T.serial(sinkhorn_repeat):  # columns, then repeat-1 times rows and columns
                if r > 0:
                    for j in T.serial(m):
                        acc[0] = mhc_sinkhorn_eps
                        for k in T.serial(m):
                            acc[0] += c[j, k]
                        for k in T.serial(m):
                            c[j, k] = c[j, k] / acc[0]
                for k in T.serial(m):
                    acc[0] = mhc_sinkhorn_eps
                    for j in T.serial(m):
                        acc[0] += c[j, k]
                    for j in T.serial(m):
                        c[j, k] = c[j, k] / acc[0]
            for j in T.serial(m):
                for k in T.serial(m):
                    comb[t, j * m + k] = c[j, k]

    return mhc_pre_big_fuse_cpu_kernel


@tilelang.jit(target="c", execution_backend="cython")
def mhc_post_cpu(mhc: int, hidden: int):
    """Write the next residual streams: out_k = post_k x + sum_j comb[j, k] residual_j."""
    n = T.dynamic("num_tokens")

    @T.prim_func
    def mhc_post_cpu_kernel(
        comb: T.Tensor[(n, mhc, mhc), T.float32],
        residual: T.Tensor[(n, mhc, hidden), T.float32],
        post: T.Tensor[(n, mhc), T.float32],
        x: T.Tensor[(n, hidden), T.float32],
        out: T.Tensor[(n, mhc, hidden), T.float32],
    ):
        with T.Kernel(n) as t:
            acc = T.alloc_local((1,), T.float32)
            for k in T.serial(mhc):
                for i in T.serial(hidden):
                    acc[0] = post[t, k] * x[t, i]
                    for j in T.serial(mhc):
                        acc[0] += comb[t, j, k] * residual[t, j, i]
                    out[t, k, i] = acc[0]

    return mhc_post_cpu_kernel
