"""Description of a cluster, which need not exist: a number of nodes with equal devices."""

from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import ValidationError

from tunix.base.errors import UserError, did_you_mean
from tunix.config import DeviceKind
from tunix.costs.devices import read_device_kinds, read_kind, replace_network

PLATFORM = "gpu"  # of all kinds of conf/command/device, whichever compiler is installed


@dataclass(frozen=True)
class Cluster:
    """A number of nodes with equal devices."""

    kind: DeviceKind
    num_nodes: int
    per_node: int  # devices of a node

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.per_node

    def __str__(self) -> str:
        return f"{self.num_nodes} x {self.per_node} {self.kind.name}"


def read_topology(text: str, network: str | None = None) -> Cluster:
    """Read `h200:8` (devices) or `h200:32x8` (nodes x devices); the kind may be the path of a YAML file.

    `network` names a file of conf/command/network; None is the network of the kind.

    Raises:
        UserError: the text has another form, or the kind is not known.
    """
    name, _, product = text.rpartition(":")
    numbers = product.split("x")
    if not name or len(numbers) > 2 or not all(number.isdecimal() and int(number) for number in numbers):
        raise UserError(f"plan.topology={text}: expected KIND:GPUS or KIND:NODESxGPUS like h200:8 or h200:32x8")
    nodes, per_node = map(int, numbers if len(numbers) == 2 else ("1", *numbers))
    kind = _read_kind(name)
    return Cluster(replace_network(kind, network) if network else kind, nodes, per_node)


def _read_kind(name: str) -> DeviceKind:
    known, path = read_device_kinds(), Path(name).expanduser()
    if name in known:
        return known[name]
    if path.suffix != ".yaml":
        hint = did_you_mean(name, list(known))
        raise UserError(f"plan.topology: there is no kind {name}; kinds are {', '.join(known)}, or FILE.yaml{hint}")
    try:
        return read_kind(yaml.safe_load(path.read_text()))
    except OSError as error:
        raise UserError(f"plan.topology: {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise UserError(f"plan.topology: {path} is not YAML") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "its content"
        raise UserError(f"plan.topology: {path}: {key}: {first['msg'].lower()}") from None
