"""Targets by name and by looking: what of a device enters the choice of a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxwarm import exc
from fxwarm.records import Target

if TYPE_CHECKING:
    import torch

CPU_SMS = 132
"""SMs that the CPU counts as: with a core count, rules over SMs would give two values instead of the real 22."""

_HOPPER_SMEM = 232448  # cudaDevAttrMaxSharedMemoryPerBlockOptin, 227 KiB on 9.0, 10.0 and 10.3

# SM counts from the vendor's data sheets; the H200's also from the driver.
_NAMED = {
    "cpu": Target("cpu", device="cpu", arch="", num_sms=CPU_SMS, smem=_HOPPER_SMEM),
    "h100": Target("h100", arch="sm_90a", num_sms=132, smem=_HOPPER_SMEM),
    "h100-pcie": Target("h100-pcie", arch="sm_90a", num_sms=114, smem=_HOPPER_SMEM),
    "h200": Target("h200", arch="sm_90a", num_sms=132, smem=_HOPPER_SMEM),
    "h20": Target("h20", arch="sm_90a", num_sms=78, smem=_HOPPER_SMEM),
    "b200": Target("b200", arch="sm_100f", num_sms=148, smem=_HOPPER_SMEM),
    "gb200": Target("gb200", arch="sm_100f", num_sms=152, smem=_HOPPER_SMEM),
}


def named(name: str) -> Target:
    """Return the target ``name``, in any case. Raises UnknownTargetError with the nearest names."""
    target = _NAMED.get(str(name).lower())
    if target is None:
        raise exc.UnknownTargetError(
            f"unknown target {name!r}; {exc.did_you_mean(str(name).lower(), _NAMED)} "
            "For another card give fxwarm.Target(name, arch=..., num_sms=...)"
        )
    return target


def current(device: torch.device | str | int | None = None) -> Target:
    """Return the target of ``device``: of the current CUDA device by default, of the CPU where there is none.

    The name is what the driver says, in lower case; a MIG slice has its own name and SM count there.
    """
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if where.type != "cuda":
        return _NAMED["cpu"]
    props = torch.cuda.get_device_properties(where)
    return Target(
        name=props.name.lower().removeprefix("nvidia ").replace(" ", "-"),
        arch=arch_of(props.major, props.minor),
        num_sms=props.multi_processor_count,
        smem=getattr(props, "shared_memory_per_block_optin", _HOPPER_SMEM),
    )


def arch_of(major: int, minor: int) -> str:
    """Return the compilers' name of a compute capability: 9.0 is "sm_90a", 10.0 "sm_100f" (nvcc 12.9 and later)."""
    if (major, minor) == (9, 0):
        return "sm_90a"
    return f"sm_{major}{minor}f" if major == 10 else f"sm_{major}{minor}a"
