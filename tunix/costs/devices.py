"""Kinds of devices: their peak speed, memory and links, read from conf/command/device."""

from functools import cache

import yaml

from tunix.config import DeviceKind
from tunix.config.values import CONF


@cache
def device_kinds() -> dict[str, DeviceKind]:
    """Return the kinds of devices in conf/command/device, keyed by file name."""
    files = sorted((CONF / "command" / "device").glob("*.yaml"))
    return {file.stem: DeviceKind.model_validate(yaml.safe_load(file.read_text())) for file in files}


def find_kind(device_kind: str) -> DeviceKind | None:
    """Return the kind of a device by the name that its driver gives it; None if that name is not known."""
    matches = [kind for kind in device_kinds().values() if kind.name in device_kind]
    # "H100 PCIe" contains "H100" too: the longest name is the most specific one.
    return max(matches, key=lambda kind: len(kind.name)) if matches else None


def peak_tflops(device_kind: str) -> float | None:
    """Return the dense bf16 peak of one device in TFLOP/s by its driver's name; None if the name is not known."""
    kind = find_kind(device_kind)
    return kind.peak_tflops if kind else None
