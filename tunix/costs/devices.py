"""Kinds of devices and networks: speed, memory and links, read from conf/command/device and conf/command/network."""

from functools import cache
from typing import Any

import yaml

from tunix.base.errors import UserError, did_you_mean
from tunix.config import DeviceKind, Network
from tunix.config.kernel_tables import MATMUL_DTYPES
from tunix.config.values import CONF


@cache
def read_device_kinds() -> dict[str, DeviceKind]:
    """Return the kinds of devices in conf/command/device, keyed by file name."""
    return {name: read_kind(values) for name, values in _read_files("device").items()}


@cache
def read_networks() -> dict[str, Network]:
    """Return the kinds of networks in conf/command/network, keyed by file name."""
    return {name: Network.model_validate(values) for name, values in _read_files("network").items()}


def _read_files(folder: str) -> dict[str, Any]:
    """Return the values of each file of a folder in conf/command, keyed by file name."""
    files = sorted((CONF / "command" / folder).glob("*.yaml"))
    return {file.stem: yaml.safe_load(file.read_text()) for file in files}


def read_kind(values: Any) -> DeviceKind:
    """Return the kind of a device file's values, in which `network` is a name.

    Raises:
        ValidationError: a value is missing or wrong.
    """
    network = read_networks().get(str(values.get("network"))) if isinstance(values, dict) else None
    return DeviceKind.model_validate(values | {"network": network} if network else values)


def replace_network(kind: DeviceKind, name: str) -> DeviceKind:
    """Return the kind of device with another network; raises `UserError` for one that is not known."""
    if name not in read_networks():
        hint = did_you_mean(name, list(read_networks()))
        raise UserError(
            f"plan.network={name}: there is no such network; choose from {', '.join(read_networks())}{hint}"
        )
    network = read_networks()[name]
    return kind.model_copy(update={"network": network, "nics_per_node": network.nics_per_node or kind.nics_per_node})


def find_kind(device_kind: str) -> DeviceKind | None:
    """Return the kind of a device by the name that its driver gives it; None if that name is not known."""
    matches = [kind for kind in read_device_kinds().values() if kind.name in device_kind]
    # "H100 PCIe" contains "H100" too: the longest name is the most specific one.
    return max(matches, key=lambda kind: len(kind.name)) if matches else None


def find_matmul_tflops(kind: DeviceKind, matmul_dtype: str) -> float | None:
    """Return the dense peak of a device for products of `training.matmul_dtype`; None where it has none."""
    return getattr(kind, MATMUL_DTYPES[matmul_dtype].speed)


def compute_peak_tflops(kind: DeviceKind, matmul_dtype: str | None, share: float) -> float:
    """Return the dense peak of a device in TFLOP/s where `matmul_dtype` has this share of the FLOPs, bf16 the rest."""
    if matmul_dtype is None:
        return kind.peak_tflops
    return 1 / (share / (find_matmul_tflops(kind, matmul_dtype) or kind.peak_tflops) + (1 - share) / kind.peak_tflops)
