"""Devices, the links between them, and how much of their figures a program reaches: the inputs of the model.

Figures are the makers', without sparsity: bytes, bytes a second in one direction, and 16-bit multiplications and
additions a second.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from quire.core.errors import ConfigError

GB, GIB, TERA = 1e9, 2**30, 1e12
Rate = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]


class Device(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An accelerator, and its link to others of its node.

    Attributes:
        memory_bytes: of one device.
        bytes_per_second: that it reads of its memory.
        operations_per_second: multiplications and additions of 16-bit numbers.
        link_bytes_per_second: to the other devices of the node together, in one direction.
        link_seconds: that a collective over the node takes with hardly any bytes.
        transport: what ranks on such devices talk over: gloo where these are processors.
    """

    memory_bytes: Annotated[int, Meta(gt=0)]
    bytes_per_second: Rate
    operations_per_second: Rate
    link_bytes_per_second: Rate
    link_seconds: Annotated[float, Meta(ge=0)] = 10e-6
    transport: Literal["nccl", "gloo"] = "nccl"


class Network(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The links between nodes.

    Attributes:
        bytes_per_second: of one device, or of all devices of a node together if `is_shared`; in one direction.
        seconds: that a message takes with hardly any bytes.
    """

    bytes_per_second: Rate
    seconds: Annotated[float, Meta(ge=0)]
    is_shared: bool = True


class Efficiency(Struct, frozen=True, kw_only=True):
    """The share of the makers' figures that a step reaches, and its fixed costs."""

    memory_efficiency: Annotated[Share, Meta(description="Share of the memory's bytes a second.")] = 0.8
    compute_efficiency: Annotated[Share, Meta(description="Share of the operations a second.")] = 0.6
    link_efficiency: Annotated[Share, Meta(description="Share of the links' bytes a second.")] = 0.7
    expert_balance: Annotated[
        Share, Meta(description="Mean load of the ranks that divide the experts, by that of the busiest.")
    ] = 0.8
    layer_microseconds: Annotated[
        float, Meta(ge=0, description="Microseconds of a layer beside its bytes and operations.")
    ] = 15.0
    step_microseconds: Annotated[
        float, Meta(ge=0, description="Microseconds of a step beside its layers: plan, inputs, sampling.")
    ] = 500.0


class Cluster(Struct, frozen=True, kw_only=True):
    """Equal nodes of equal devices."""

    num_nodes: int
    devices_per_node: int
    device: Device
    network: Network
    efficiency: Efficiency = Efficiency()

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def network_bytes_per_second(self) -> float:
        """The network rate of one device, while all devices of its node send as much."""
        share = self.devices_per_node if self.network.is_shared else 1
        return self.network.bytes_per_second / share


def _gpu(memory: float, bandwidth: float, operations: float, link: float, link_us: float = 10) -> Device:
    """From GB (or GiB where the maker says so), GB/s, TFLOP/s and GB/s."""
    return Device(
        memory_bytes=int(memory * GIB),
        bytes_per_second=bandwidth * GB,
        operations_per_second=operations * TERA,
        link_bytes_per_second=link * GB,
        link_seconds=link_us * 1e-6,
    )


DEVICES: dict[str, Device] = {
    "a100-40": _gpu(40, 1555, 312, 300),
    "a100": _gpu(80, 2039, 312, 300),
    "h100": _gpu(80, 3350, 989, 450),
    "h100-pcie": _gpu(80, 2000, 756, 64, 25),
    "h200": _gpu(139, 4800, 989, 450),
    "b200": _gpu(179, 7700, 2250, 900),
    "mi300x": _gpu(192, 5300, 1307, 448, 15),
    "mi325x": _gpu(256, 6000, 1307, 448, 15),
    "l4": _gpu(22, 300, 121, 32, 30),
    "l40s": _gpu(45, 864, 362, 32, 30),
    "rtx4090": _gpu(24, 1008, 165, 32, 30),
}
"""By the name that `--device` takes. Memory is what a program sees of it, in GiB."""

NETWORKS: dict[str, Network] = {
    "ib-ndr": Network(bytes_per_second=50 * GB, seconds=6e-6, is_shared=False),
    "ib-hdr": Network(bytes_per_second=25 * GB, seconds=7e-6, is_shared=False),
    "eth-400": Network(bytes_per_second=50 * GB, seconds=20e-6),
    "eth-100": Network(bytes_per_second=12.5 * GB, seconds=30e-6),
    "eth-25": Network(bytes_per_second=3.125 * GB, seconds=40e-6),
    "eth-10": Network(bytes_per_second=1.25 * GB, seconds=50e-6),
}
"""By the name that `--network` takes. InfiniBand has an adapter for each device, Ethernet one for each node."""


def find_device(name: str) -> Device:
    """The device of the table, or the one that a JSON file describes. Raises ConfigError if there is neither."""
    return DEVICES.get(name) or _read("--device", name, Device, DEVICES)


def find_network(name: str) -> Network:
    """As `find_device`."""
    return NETWORKS.get(name) or _read("--network", name, Network, NETWORKS)


Kind = TypeVar("Kind", Device, Network)


def _read(flag: str, path: str, kind: type[Kind], table: Mapping[str, Kind]) -> Kind:
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=kind)
    except OSError as error:
        names = ", ".join(table)
        raise ConfigError(f"{flag} {path}: choose from {names}, or name a JSON file ({error.strerror}).") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{flag} {path}: {error}.") from None
