"""Before jax starts: versions and their known conflicts, environment variables, XLA_FLAGS. Knows no jax."""

import difflib
import importlib.util
import mmap
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from importlib import metadata
from pathlib import Path

import yaml
from packaging.specifiers import SpecifierSet

from tunix.config.values import CONF
from tunix.doctor.findings import Finding

SHOWN = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tunix-trainer")
CONFLICTS = (  # package, versions, and with another's versions: what happens
    ("jax", ">=0.11", "flax", "<=0.12.8", "flax 0.12.8 does not import with jax 0.11; take a newer flax"),
    ("jax", "<0.10.2", "", "", "tunix needs jax 0.10.2 or newer"),
    ("google-tunix", "", "", "", "it has a package called tunix too; pip uninstall google-tunix, install tunix again"),
    ("jax-cuda12-plugin", "", "jax-cuda13-plugin", "", "jax finds two CUDA plugins; uninstall one of them"),
)  # fmt: skip
SAME = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")  # version as jaxlib
PREFIXES = ("NCCL_", "TUNIX_", "XLA_PYTHON_CLIENT_")
CLIENT = ("MEM_FRACTION", "PREALLOCATE", "ALLOCATOR")  # of XLA_PYTHON_CLIENT_; docs.jax.dev, GPU memory allocation
COSTLY = {  # name, the value that costs, what
    ("NCCL_P2P_DISABLE", "1"): "GPUs of a node do not use NVLink",
    ("NCCL_IB_DISABLE", "1"): "nodes talk over TCP in place of InfiniBand",
    ("NCCL_SHM_DISABLE", "1"): "processes of a node talk over the network",
    ("NCCL_DEBUG", "TRACE"): "NCCL writes a line for every call",
    ("CUDA_LAUNCH_BLOCKING", "1"): "every kernel is waited for",
    ("JAX_DISABLE_JIT", "1"): "nothing is compiled",
    ("JAX_DEBUG_NANS", "1"): "every operation is waited for and checked",
    ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform"): "every array is allocated by the driver",
}
ASK_XLA = "import jax; jax.config.update('jax_platforms', 'cpu'); jax.devices()"
Version = Callable[[str], str | None]


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions(version: Version = installed) -> Iterator[Finding]:
    """What is installed, and pairs that are known not to work."""
    found = {name: version(name) for name in SHOWN}
    listed = ", ".join(f"{name} {number}" for name, number in found.items() if number)
    yield Finding("versions", "ok", f"Python {sys.version.split()[0]}, {listed}")
    for package, ours, other, theirs, why in CONFLICTS:
        if _matches(version(package), ours) and (not other or _matches(version(other), theirs)):
            both = f" with {other} {version(other)}" if other else ""
            yield Finding("versions", "error", f"{package} {version(package)}{both}: {why}")
    jaxlib = version("jaxlib")
    for name in ("jax", *SAME):
        number = version(name)
        if number and jaxlib and number != jaxlib:
            close = name == "jax" and number.split(".")[:2] == jaxlib.split(".")[:2]
            text = f"{name} {number} with jaxlib {jaxlib}: install the same version of both"
            yield Finding("versions", "warning" if close else "error", text)


def _matches(number: str | None, specifier: str) -> bool:
    return number is not None and SpecifierSet(specifier).contains(number, prereleases=True)


def variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Names that nobody reads, and values that cost time."""
    known = {*(f"NCCL_{name}" for name in _nccl()), *(f"XLA_PYTHON_CLIENT_{name}" for name in CLIENT), *_ours()}
    given = sorted(name for name in environment if name.startswith(PREFIXES))
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            meant = f"; did you mean {near[0]}?" if near else ""
            yield Finding("variables", "warning", f"{name}={environment[name]}: nothing reads this name{meant}")
    for (name, value), what in COSTLY.items():
        if environment.get(name) == value:
            yield Finding("variables", "warning", f"{name}={value}: {what}")
    shown = [f"{name}={environment[name]}" for name in given if name in known]
    yield Finding("variables", "ok", ", ".join(shown) or f"none of {', '.join(f'{prefix}*' for prefix in PREFIXES)}")


def _nccl() -> set[str]:
    """Names without NCCL_: those of its manual, and those in the library where it is installed."""
    names = set(yaml.safe_load((CONF / "command" / "nccl.yaml").read_text())["names"])
    for folder in map(Path, sys.path):
        for library in folder.glob("nvidia/nccl/lib/libnccl.so*"):
            names |= {name.decode() for name in re.findall(rb"NCCL_([A-Z0-9_]+)\0", library.read_bytes())}
    return names


def _ours() -> set[str]:
    """Names that stand in tunix's own source and values."""
    sources = [*Path(__file__).parents[1].rglob("*.py"), *CONF.rglob("*.yaml")]
    return {name for path in sources for name in re.findall(r"\bTUNIX_[A-Z_]+[A-Z]\b", path.read_text())}


def xla_flags(environment: MutableMapping[str, str]) -> Iterator[Finding]:
    """Flags that XLA knows, as a child says: an unknown one aborts the process that starts XLA.

    Those are taken out of `environment`, so that the doctor lives on.
    """
    flags = environment.get("XLA_FLAGS", "")
    if not flags:
        return
    mistakes: list[str] = []
    while (said := _ask_xla(environment)) is not None:
        words = shlex.split(environment["XLA_FLAGS"])
        culprits = [word for word in words if word in said.partition("in XLA_FLAGS:")[2].partition("\n")[0].split()]
        if wrong := re.search(r"Couldn't interpret value .* for flag (\w+)", said):
            culprits = [word for word in words if word.lstrip("-").partition("=")[0] == wrong[1]]
        if not culprits:
            del environment["XLA_FLAGS"]
            yield Finding("XLA_FLAGS", "error", f"XLA does not start with them: {said.strip().splitlines()[0]}")
            break
        environment["XLA_FLAGS"] = " ".join(word for word in words if word not in culprits)
        for word in culprits:
            near = difflib.get_close_matches(word.lstrip("-").partition("=")[0], _names_in_jaxlib(), n=1)
            hint = f" (did you mean --{near[0]}?)" if near and not wrong else ""
            mistakes.append(f"XLA {'cannot read the value of' if wrong else 'does not know'} {word}{hint}")
    for mistake in mistakes:
        yield Finding("XLA_FLAGS", "error", f"{mistake}; it would abort every process")
    if environment.get("XLA_FLAGS") == flags:
        yield Finding("XLA_FLAGS", "ok", flags)


def _names_in_jaxlib() -> set[str]:
    """Words of the library that begin like flags; XLA's own list is cut off."""
    found = importlib.util.find_spec("jaxlib")
    folders = (found.submodule_search_locations or []) if found else []
    names: set[bytes] = set()
    for library in (path for folder in folders for path in Path(folder).glob("libjax_common*")):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as binary:
            names |= set(re.findall(rb"\0(xla_[a-z0-9_]+)(?=\0)", binary))
    return {name.decode() for name in names}


def _ask_xla(environment: Mapping[str, str]) -> str | None:
    """What XLA says as it dies of its flags; None if it lives."""
    words = [sys.executable, "-c", ASK_XLA]
    done = subprocess.run(words, env=dict(environment), capture_output=True, text=True, check=False, timeout=60)
    lines = [
        line.partition("] ")[2] or line
        for line in done.stderr.splitlines()
        if "in XLA_FLAGS" in line or "Couldn't interpret value" in line
    ]
    return None if done.returncode == 0 else "\n".join([*lines, done.stderr])
