"""What kinds of devices can do."""

from functools import cache

import yaml

from tunix.config import DeviceKind
from tunix.config.values import CONF


@cache
def device_kinds() -> dict[str, DeviceKind]:
    """The kinds of conf/command/device by file name."""
    files = sorted((CONF / "command" / "device").glob("*.yaml"))
    return {file.stem: DeviceKind.model_validate(yaml.safe_load(file.read_text())) for file in files}


def kind_named(device_kind: str) -> DeviceKind | None:
    """The kind that the driver's name for a device means; None where it is not known."""
    named = [kind for kind in device_kinds().values() if kind.name in device_kind]
    return max(named, key=lambda kind: len(kind.name)) if named else None


def peak_tflops(device_kind: str) -> float | None:
    """Dense bf16 peak of one device in TFLOP/s by the driver's name for it; None where it is not known."""
    kind = kind_named(device_kind)
    return kind.peak_tflops if kind else None
