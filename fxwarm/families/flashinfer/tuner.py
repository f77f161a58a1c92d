"""The library's tuner: its context, its look-up, its table, private names included. A canary test imports each.

Its table is in two parts. What this process measured is keyed by objects of this process and comes first; what a file
gave is keyed by text. Both are in what ``save_configs`` writes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fxwarm.families.flashinfer.buckets import buckets_up_to
from fxwarm.families.flashinfer.tuner_key import Entry
from fxwarm.families.flashinfer.upstream import activation, attribute, load, open_module

__all__ = ["autotune", "find", "pin_limit", "put", "timings", "tuner", "undisturbed", "watch"]

_SEEDS_TO = 1 << 16
Timings = dict[str, dict[str, float]]
"""File key -> {tactic as JSON: seconds}."""


def tuner() -> Any:
    """Return the process's one tuner."""
    load()
    return attribute("flashinfer.autotuner", "AutoTuner").get()


def autotune() -> contextlib.AbstractContextManager[Any]:
    """Return the library's tuning context, without a file: entering with one drops what another file had loaded."""
    context: contextlib.AbstractContextManager[Any] = attribute("flashinfer.autotuner", "autotune")(
        True
    )
    return context


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Run as if no ``autotune(tuning_buckets=, round_up=, skip_ops=)`` were open on this thread.

    An engine may make its first call inside one; its buckets would then be in our keys, and never looked up after it.
    """
    stacks = [tuner()._get_override_stack(), tuner()._get_skip_ops_stack()]
    saved = [stack[:] for stack in stacks]
    try:
        for stack in stacks:
            stack.clear()
        yield
    finally:
        for stack, before in zip(stacks, saved, strict=True):
            stack[:] = before


def pin_limit(limit: int, others: Iterable[int]) -> None:
    """Make ``limit`` the ``tune_max_num_tokens`` in force for the process, whatever calls pass later.

    The library assigns a class attribute the first time it sees a value and never again for that value, so the last
    *new* one wins. Showing it all the others first leaves ours. Source: 0.6.18.post1 to 0.7.4.
    """
    refine = open_module("fused_moe_90").MoERunner.refine_tuning_config
    refine.cache_clear()
    for seen in sorted({*buckets_up_to(_SEEDS_TO), *others} - {limit}):
        refine(seen)
    refine(limit)


def find(entry: Entry, shapes: Sequence[tuple[int, ...]]) -> str | None:
    """Return the tactic, as JSON, that a call with tensors of these ``shapes`` finds stored now; None without one."""
    runner, config, inputs = _moe(entry) if entry.runner == "MoERunner" else _gemm(entry)
    found, _, tactic, _ = tuner().search_cache(
        entry.op, [runner], tuple(shapes), config, inputs=inputs
    )
    return json.dumps(tactic) if found else None


def _moe(entry: Entry) -> tuple[Any, Any, list[Any]]:
    import torch

    namespace = open_module("fused_moe_90")
    options: dict[str, Any] = dict(entry.options)
    for name, value in options.items():
        if name.endswith("_dtype"):
            options[name] = getattr(torch, str(value))
    options["activation_type"] = activation(options["activation_type"])
    for name in ("tp_rank", "ep_rank", "cluster_rank"):
        options.setdefault(name, 0)
    runner = namespace.MoERunner(**options)
    runner.gemm_idx_for_tuning = 1 if entry.op.endswith("gemm1") else 2
    return runner, namespace.MoERunner.tuning_config, []


def _gemm(entry: Entry) -> tuple[Any, Any, list[Any]]:
    import torch

    runner = open_module("gemm").cublas_fp8_gemm_runner()
    config = attribute("flashinfer.gemm.gemm_base", "_FP8_GEMM_SM100_TUNING_CONFIG")
    a, b, out = (
        torch.empty(0, dtype=getattr(torch, str(v)), device="meta") for _, v in entry.options
    )
    return runner, config, [a, b, None, None, out, None]


@contextlib.contextmanager
def timings() -> Iterator[Timings]:
    """Measure anew inside, whatever the table holds; yield what each tactic took. The table is then as it was.

    The library keeps the winner alone, so both calls that lead to a measurement are listened to.
    """
    one, heard, op = tuner(), Timings(), [""]
    choose, profile = one.choose_one, one._profile_single_kernel

    def choose_one(custom_op: str, *args: Any, **kwargs: Any) -> Any:
        op[0] = custom_op
        return choose(custom_op, *args, **kwargs)

    def profile_single(runner: Any, inputs: Any, tactic: Any, config: Any, **kwargs: Any) -> float:
        taken: float = profile(runner, inputs, tactic, config, **kwargs)  # milliseconds
        shapes = tuple(tuple(t.shape) if hasattr(t, "shape") else (0,) for t in inputs)
        extras = runner.get_cache_key_extras(inputs)
        key = one._get_cache_key(op[0], runner, shapes, config, extras)
        heard.setdefault(key.file_key, {})[json.dumps(tactic)] = taken / 1e3
        return taken

    with tempfile.TemporaryDirectory(prefix="fxwarm-tactics-") as folder:
        before = Path(folder, "before.json")
        one.save_configs(str(before))
        one.clear_cache()
        one.choose_one, one._profile_single_kernel = choose_one, profile_single
        try:
            yield heard
        finally:
            del one.choose_one, one._profile_single_kernel
            one.clear_cache()
            one.load_configs(str(before))


def put(chosen: Mapping[str, tuple[str, str]]) -> None:
    """Make ``{file key: (runner, tactic as JSON)}`` what the table holds, over what this process measured itself."""
    one = tuner()
    with tempfile.TemporaryDirectory(prefix="fxwarm-tactics-") as folder:
        path = Path(folder, "table.json")
        one.save_configs(str(path))
        table = json.loads(path.read_text())
        table.update({key: [name, json.loads(tactic)] for key, (name, tactic) in chosen.items()})
        path.write_text(json.dumps(table))
        one.clear_cache()
        one.load_configs(str(path))


@contextlib.contextmanager
def watch() -> Iterator[list[str]]:
    """Yield a list that fills with what the library warns of: memory that ran out, an entry that is not there."""
    load()
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                said.append(record.getMessage())

    logger, handler = attribute("flashinfer.jit.core", "logger"), Handler()
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
