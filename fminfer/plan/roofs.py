"""What a machine can do at most: memory, bandwidths and arithmetic, by flags or by a kind.

Kinds are as NVIDIA's data sheets say: dense products in bfloat16, NVLink and PCIe one
way. Memory is what drivers leave of it. The node around the devices is assumed: a host with 128
GiB, one NVMe disk on PCIe 4, a network of 200 Gbit/s.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Literal, get_args

from fminfer.core.errors import UsageError
from fminfer.core.option import Bytes, Count, Options, Rate, option, options_of

DeviceKind = Literal[
    "this", "a100-40gb", "a100-80gb", "h100-80gb", "h200", "l4", "l40s"
]
ASSUMED_DISK_RATE = 7e9
_check = partial(option, group="Check", commands=("check",))


@dataclass(slots=True, frozen=True)
class Roofs:
    """What devices and their node can do. Rates are per second, bandwidths in bytes."""

    device_bytes: int
    memory_rate: float  # of a device
    arithmetic_rate: float  # multiplying and adding are two operations
    link_rate: float  # from a device to another one of its node
    host_rate: float  # from the host's memory to a device
    host_bytes: int = 128 << 30
    disk_rate: float = ASSUMED_DISK_RATE  # of a node
    network_rate: float = 25e9  # from a node to another one
    num_cores: int = 32  # of a node, for its processes
    num_devices: int = 1  # of a node
    num_nodes: int = 1


def _published(
    gib: int, memory: float, arithmetic: float, link: float, host: float
) -> Roofs:
    """Return a kind's roofs: memory in GiB, products in TFLOP/s, the others in GB/s."""
    return Roofs(gib << 30, memory * 1e9, arithmetic * 1e12, link * 1e9, host * 1e9)


KINDS: dict[str, Roofs] = {
    "a100-40gb": _published(39, 1555, 312, 300, 32),
    "a100-80gb": _published(79, 2039, 312, 300, 32),
    "h100-80gb": _published(79, 3350, 989, 450, 64),
    "h200": _published(139, 4800, 989, 450, 64),
    "l4": _published(22, 300, 121, 32, 32),
    "l40s": _published(44, 864, 362, 32, 32),
}


@dataclass(frozen=True)
class PlanOptions(Options):
    """For which devices `fminfer check` plans, and what they can do."""

    is_plan: bool = _check(
        "Compare the ways to spread the run over the devices, with weights in 16, 8 "
        "and 4 bits. Predict the time of each. Layers that do not fit are streamed. "
        "Flags that you give, such as --tp, --quantize and --offload, hold for all "
        "ways."
    )
    device_kind: DeviceKind | None = _check(
        "Devices to plan for, with their published memory and rates. Other flags replace single "
        "figures. this: measure this machine, for about a second.  [default: this, if no "
        "--device-memory is given]"
    )
    num_devices: Count | None = _check(
        "Devices of a node.  [default: 1, or this machine's GPUs]"
    )
    num_nodes: Count = _check(
        "Nodes. Tensor parallelism stays within a node.", default=1
    )
    memory_rate: Rate | None = _check(
        "Memory bandwidth of a device, in bytes a second: 2039G.",
        flags=("--memory-bandwidth",),
    )
    arithmetic_rate: Rate | None = _check(
        "Rate of a device's matrix products in 16 bits, in operations a second: 312T."
    )
    link_rate: Rate | None = _check(
        "Bandwidth between two devices of a node, in bytes a second: 300G.",
        flags=("--link-bandwidth",),
    )
    host_bytes: Bytes | None = _check(
        "Host memory of each node, for streamed layers.  [default: 128G, or as measured here]",
        flags=("--host-memory",),
    )
    host_rate: Rate | None = _check(
        "Bandwidth from the host's memory to a device, in bytes a second: 32G.",
        flags=("--host-bandwidth",),
    )
    disk_rate: Rate | None = _check(
        "Read bandwidth of a node's disk, in bytes a second.  [default: 7G, or as "
        "measured here]",
        flags=("--disk-bandwidth",),
    )

    def check(self) -> None:
        """Refuse --num-devices and --num-nodes without --plan."""
        if (self.num_nodes > 1 or self.num_devices) and not self.is_plan:
            raise UsageError(
                "--num-devices and --num-nodes need --plan, which spreads a run over them"
            )

    @property
    def rate_flags(self) -> list[str]:
        """The flags of rates that were given."""
        names = (n for n in options_of(PlanOptions) if n.endswith("_rate"))
        return [
            options_of(PlanOptions)[n].told
            for n in names
            if getattr(self, n) is not None
        ]

    @property
    def known(self) -> Roofs | None:
        """The published figures of the kind of devices; None: there are none."""
        return KINDS.get(self.device_kind or "")

    def is_this(self, device_bytes: int | None) -> bool:
        """Tell whether the plan is for this machine; `device_bytes` is --device-memory."""
        none_told = device_bytes is None and self.memory_rate is None
        return self.device_kind == "this" or (self.device_kind is None and none_told)

    def roofs_of(self, known: Roofs | None, device_bytes: int | None) -> Roofs:
        """Return the known figures, replaced by those that flags give; refuse too few."""
        rates = {
            n: v for each in fields(Roofs) if (v := getattr(self, n := each.name, None))
        }
        if device_bytes is not None:
            rates["device_bytes"] = device_bytes
        if known is not None:
            return replace(known, **rates)
        names = ("memory_rate", "arithmetic_rate", "link_rate", "host_rate")
        missing = [
            options_of(PlanOptions)[name].told for name in names if name not in rates
        ]
        if device_bytes is None:
            missing.insert(0, "--device-memory")
        if missing:
            raise UsageError(
                "too little is known of the devices: give --device-kind (one of "
                f"{', '.join(get_args(DeviceKind))}), or {', '.join(missing)}"
            )
        return Roofs(**rates)
