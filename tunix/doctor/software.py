"""Checks before jax starts: versions and known conflicts, environment variables, XLA_FLAGS. Imports no jax."""

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
# A package and its versions, another package and its versions, and what happens if both are installed. Where the other
# is "", the first alone is an error.
CONFLICTS = (
    ("jax", ">=0.11", "flax", "<=0.12.8", "flax 0.12.8 does not import with jax 0.11; take a newer flax"),
    ("jax", "<0.10.2", "", "", "tunix needs jax 0.10.2 or newer"),
    ("google-tunix", "", "", "", "it has a package called tunix too; pip uninstall google-tunix, install tunix again"),
    ("jax-cuda12-plugin", "", "jax-cuda13-plugin", "", "jax finds two CUDA plugins; uninstall one of them"),
)  # fmt: skip
SAME = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")  # must have jaxlib's version
PREFIXES = ("NCCL_", "TUNIX_", "XLA_PYTHON_CLIENT_")  # variables whose names are checked
CLIENT = ("MEM_FRACTION", "PREALLOCATE", "ALLOCATOR")  # after XLA_PYTHON_CLIENT_; docs.jax.dev, GPU memory allocation
# Variables whose value makes training slow, and the effect.
COSTLY = {
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


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_versions(version: Version = installed_version) -> Iterator[Finding]:
    """List what is installed, and find pairs that are known not to work together."""
    listed = ", ".join(f"{name} {number}" for name in SHOWN if (number := version(name)))
    yield Finding("versions", "ok", f"Python {sys.version.split()[0]}, {listed}")
    for package, versions, other, other_versions, why in CONFLICTS:
        if _matches(version(package), versions) and (not other or _matches(version(other), other_versions)):
            both = f" with {other} {version(other)}" if other else ""
            yield Finding("versions", "error", f"{package} {version(package)}{both}: {why}")
    jaxlib = version("jaxlib")
    for name in ("jax", *SAME):
        number = version(name)
        if number and jaxlib and number != jaxlib:
            # jax and jaxlib of one minor version may work together; a plugin must have jaxlib's version exactly.
            close = name == "jax" and number.split(".")[:2] == jaxlib.split(".")[:2]
            text = f"{name} {number} with jaxlib {jaxlib}: install the same version of both"
            yield Finding("versions", "warning" if close else "error", text)


def _matches(number: str | None, specifier: str) -> bool:
    return number is not None and SpecifierSet(specifier).contains(number, prereleases=True)


def check_variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Find variables that nothing reads, which are often typos, and values that make training slow."""
    client = (f"XLA_PYTHON_CLIENT_{name}" for name in CLIENT)
    known = {*(f"NCCL_{name}" for name in _read_nccl_names()), *client, *_read_own_names()}
    given = sorted(name for name in environment if name.startswith(PREFIXES))
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            meant = f"; did you mean {near[0]}?" if near else ""
            if "TIMEOUT" in name:
                meant = f"; distributed.init_timeout_s and distributed.heartbeat_timeout_s say how long to wait{meant}"
            yield Finding("variables", "warning", f"{name}={environment[name]}: nothing reads this name{meant}")
    for (name, value), effect in COSTLY.items():
        if environment.get(name) == value:
            yield Finding("variables", "warning", f"{name}={value}: {effect}")
    values = [f"{name}={environment[name]}" for name in given if name in known]
    yield Finding("variables", "ok", ", ".join(values) or f"none of {', '.join(f'{prefix}*' for prefix in PREFIXES)}")


def _read_nccl_names() -> set[str]:
    """Return NCCL's names without NCCL_: those of its manual, and those in the installed library."""
    names = set(yaml.safe_load((CONF / "command" / "nccl.yaml").read_text())["names"])
    for folder in map(Path, sys.path):
        for library in folder.glob("nvidia/nccl/lib/libnccl.so*"):
            names |= {name.decode() for name in re.findall(rb"NCCL_([A-Z0-9_]+)\0", library.read_bytes())}
    return names


def _read_own_names() -> set[str]:
    """Return the names TUNIX_... in tunix's own source and config files."""
    sources = [*Path(__file__).parents[1].rglob("*.py"), *CONF.rglob("*.yaml")]
    return {name for path in sources for name in re.findall(r"\bTUNIX_[A-Z_]+[A-Z]\b", path.read_text())}


def check_xla_flags(environment: MutableMapping[str, str]) -> Iterator[Finding]:
    """Find flags of XLA_FLAGS that XLA refuses.

    XLA aborts the process that starts it with an unknown flag. So a child process starts XLA, and its last words name
    the flag. That flag is removed from `environment`, so that the doctor itself can go on, and the child starts again.
    """
    flags = environment.get("XLA_FLAGS", "")
    if not flags:
        return
    mistakes: list[str] = []
    # XLA names the unknown flags all at once, and of bad values the first. Each round removes what was named.
    while (last_words := _ask_xla(environment)) is not None:
        words = shlex.split(environment["XLA_FLAGS"])
        unknown = last_words.partition("in XLA_FLAGS:")[2].partition("\n")[0].split()
        refused = [word for word in words if word in unknown]
        if bad_value := re.search(r"Couldn't interpret value .* for flag (\w+)", last_words):
            refused = [word for word in words if word.lstrip("-").partition("=")[0] == bad_value[1]]
        if not refused:
            del environment["XLA_FLAGS"]
            yield Finding("XLA_FLAGS", "error", f"XLA does not start with them: {last_words.strip().splitlines()[0]}")
            break
        environment["XLA_FLAGS"] = " ".join(word for word in words if word not in refused)
        for word in refused:
            near = difflib.get_close_matches(word.lstrip("-").partition("=")[0], _read_flag_names(), n=1)
            hint = f" (did you mean --{near[0]}?)" if near and not bad_value else ""
            mistakes.append(f"XLA {'cannot read the value of' if bad_value else 'does not know'} {word}{hint}")
    for mistake in mistakes:
        yield Finding("XLA_FLAGS", "error", f"{mistake}; it would abort every process")
    if environment.get("XLA_FLAGS") == flags:
        yield Finding("XLA_FLAGS", "ok", flags)


def _read_flag_names() -> set[str]:
    """Return the words in jaxlib's library that look like names of flags; no function of XLA's lists them.

    In the library's table of strings each one stands between two zero bytes.
    """
    spec = importlib.util.find_spec("jaxlib")
    folders = (spec.submodule_search_locations or []) if spec else []
    names: set[bytes] = set()
    for library in (path for folder in folders for path in Path(folder).glob("libjax_common*")):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as binary:
            names |= set(re.findall(rb"\0(xla_[a-z0-9_]+)(?=\0)", binary))
    return {name.decode() for name in names}


def _ask_xla(environment: Mapping[str, str]) -> str | None:
    """Start XLA in a child process; return what it prints before it aborts, or None if it starts."""
    words = [sys.executable, "-c", ASK_XLA]
    result = subprocess.run(words, env=dict(environment), capture_output=True, text=True, check=False, timeout=60)
    # The line that names the flags first, without the time and the place in the source before it: F0101 ... flags.cc:1]
    # ...
    lines = [
        line.partition("] ")[2] or line
        for line in result.stderr.splitlines()
        if "in XLA_FLAGS" in line or "Couldn't interpret value" in line
    ]
    return None if result.returncode == 0 else "\n".join([*lines, result.stderr])
