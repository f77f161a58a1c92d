"""The promise, on a CPU with real TileLang kernels: without a warmup a new token count compiles, with one none does."""

from __future__ import annotations

import pytest

from fxwarm.ops import mhc_factories as factories
from tests.fxwarm.families.tilelang.process import run

pytestmark = pytest.mark.skipif(not factories.has_tilelang(), reason="needs TileLang")

SWEEP = """
def sweep(sizes=(1, 2, 64, 65, 2112, 2113, 2200, 2816, 2817, 4225)):
    import torch.ops
    from fxwarm.ops import mhc
    jit.builds()  # counts from here on
    built = []
    for tokens in sizes:
        inputs = layer(tokens, 256)
        post_mix, comb, x = mhc.mhc_pre(*inputs, *ARGS)
        mhc.mhc_post(x, inputs[0], post_mix, comb)
        built.append(jit.Counts.builds)
    return built
"""


def test_cold_each_new_number_of_splits_compiles_in_the_hot_path(fresh):
    found = run(SWEEP + "import tilelang\nprint(json.dumps(sweep()))")
    # the post kernel once; splits 4, 3, 2, 1 at 1, 2113, 2817 and 4225 tokens
    assert found == [2, 2, 2, 2, 2, 3, 3, 3, 4, 5]


def test_warm_nothing_compiles_in_this_process_or_the_next(fresh):
    warm = SWEEP + (
        "plan = planned(pre(256, 8192), post(256), target=CPU)\n"
        "missing = family.missing(plan, CPU)\n"
        "errors = [b.error for b in family.build(missing, CPU, 1) if b.error]\n"
        "errors += [x.error for x in family.load(plan, CPU) if x.error]\n"
        "built, loads, looked = jit.builds(), jit.Counts.loads, jit.Counts.elaborations\n"
        "swept = sweep()\n"
        "after = [jit.Counts.loads - loads, jit.Counts.elaborations - looked]\n"
        "print(json.dumps([len(plan), len(missing), errors, built, swept[-1], after]))"
    )
    assert run(warm) == [
        5,
        5,
        [],
        0,
        0,
        [0, 0],
    ]  # built in workers, loaded here: no compile, no look at the disk
    assert run(warm) == [5, 0, [], 0, 0, [0, 0]]
