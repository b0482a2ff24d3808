"""Devices and links: memory, speeds, and the ways an adapter comes to a device. Makers' figures, and rules of thumb.

Speeds of devices are peaks, as their makers tell them (dense 16-bit products); what of a peak is reached in practice is
`traffic`'s assumption.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from loraplex.errors import InvalidParameter

_MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class Device:
    """What a worker computes on. `memory_bytes` is what its driver reports in all; 0 where it has to be given."""

    name: str
    kind: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops: float
    host_bytes_per_s: float
    """From host memory to the device: PCIe, or on a CPU a copy."""


_PCIE_4: Final = 25e9  # of 32 GB/s, 16 lanes
_PCIE_5: Final = 50e9
_ALL: Final = (
    Device("H200", "cuda", 143_771 * _MIB, 4.8e12, 989e12, _PCIE_5),
    Device("H100", "cuda", 81_559 * _MIB, 3.35e12, 989e12, _PCIE_5),
    Device("A100-80", "cuda", 81_920 * _MIB, 2.039e12, 312e12, _PCIE_4),
    Device("A100-40", "cuda", 40_960 * _MIB, 1.555e12, 312e12, _PCIE_4),
    Device("L40S", "cuda", 46_068 * _MIB, 0.864e12, 362e12, _PCIE_4),
    Device("L4", "cuda", 23_034 * _MIB, 0.3e12, 121e12, _PCIE_4),
    Device("A10G", "cuda", 23_028 * _MIB, 0.6e12, 70e12, _PCIE_4),
    Device("RTX-4090", "cuda", 24_564 * _MIB, 1.008e12, 165e12, _PCIE_4),
    # Two cores of a server, as measured with this worker: a peak would say little of what memory lets them do.
    Device("CPU", "cpu", 0, 28e9, 160e9, 5e9),
)
DEVICES: Final[Mapping[str, Device]] = {device.name: device for device in _ALL}


@dataclass(frozen=True, slots=True)
class Links:
    """Where adapters come from: bytes per second, and seconds before the first byte."""

    disk_bytes_per_s: float = 3e9
    disk_latency_s: float = 0.0002
    network_bytes_per_s: float = 1.1e9
    network_latency_s: float = 0.002
    store_bytes_per_s: float = 0.2e9
    store_latency_s: float = 0.05
    hash_bytes_per_s: float = 1e9
    """SHA-256 of one core: a file that comes over a network is checked before it is used."""


@dataclass(frozen=True, slots=True)
class LoadTime:
    """How long something takes to come to the device from one place."""

    source: str
    seconds: float


def load_times(num_bytes: int, device: Device, links: Links) -> tuple[LoadTime, ...]:
    """Return how long so many bytes take to the device, from each place that may hold them.

    A worker takes the steps one after the other: fetched and checked, on the disk, read from there, to the device.
    """
    to_device = num_bytes / device.host_bytes_per_s
    from_disk = links.disk_latency_s + num_bytes / links.disk_bytes_per_s + to_device
    checked = num_bytes / links.hash_bytes_per_s
    network = links.network_latency_s + num_bytes / links.network_bytes_per_s
    store = links.store_latency_s + num_bytes / links.store_bytes_per_s
    return (
        LoadTime("host memory", to_device),
        LoadTime("disk", from_disk),
        LoadTime("network", network + checked + from_disk),
        LoadTime("object store", store + checked + from_disk),
    )


def named_device(name: str) -> Device:
    """Return the device of that name, in any case. Raises InvalidParameter."""
    wanted = re.sub(r"[ _]+", "-", name.strip().lower())
    aliases = {"a100": "a100-80", "4090": "rtx-4090", "a100-80gb": "a100-80", "a100-40gb": "a100-40"}
    for device in DEVICES.values():
        if device.name.lower() == aliases.get(wanted, wanted):
            return device
    raise InvalidParameter(f"--device {name!r} is not known; known are {', '.join(DEVICES)}", field="device")


_MAX_SIZE: Final = 1e18
_UNITS: Final = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY_UNITS: Final = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_size(text: str, flag: str) -> int:
    """Return the bytes of "80GB", "16GiB", "24G" (as GB) or "123456". Raises InvalidParameter, naming the flag."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?(?:/s)?\s*", text.lower())
    size = 0.0
    if match is not None and not (match[3] and not match[2]):
        size = float(match[1]) * (_BINARY_UNITS if match[3] else _UNITS)[match[2]]
    if not 1 <= size <= _MAX_SIZE:
        raise InvalidParameter(
            f"{flag} {text[:80]!r} is no size; give e.g. 24GB, 16GiB or a number of bytes", field=flag.lstrip("-")
        )
    return int(size)
