"""Ways to install tunix: what containers copy and install is there, and optional packages stay optional."""

import ast
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from config.test_wheel import SOURCES
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from support.harness import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Modules of packages that only an extra brings, with the extra. xprof is a plugin of TensorBoard: nothing imports it.
OPTIONAL = {
    "datasets": "hf", "sentencepiece": "hf", "pyarrow": "hf", "qwix": "quantize", "math_verify": "math",
    "wandb": "wandb", "mlflow": "mlflow", "fsspec": "buckets", "s3fs": "buckets", "gcsfs": "buckets",
    "aiohttp": "buckets", "lm_eval": "lm_eval", "reasoning_gym": "reasoning", "ray": "ray",
    "gguf": "gguf", "starlette": "serve", "uvicorn": "serve", "prometheus_client": "serve",
}  # fmt: skip
NOT_IMPORTED = {
    "cuda12",
    "cuda13",
    "profile",
    "site",
    "servers",
    "tests",
    "mlflow_server",
    "dev",
}  # extras without a module for tunix/
SOURCE_FILES = sorted((ROOT / "tunix").rglob("*.py"))


def read_pins(name: str) -> dict[str, set[str]]:
    """Versions of each package in a file of requirements; several where they depend on the Python."""
    pins: dict[str, set[str]] = {}
    for package, version in re.findall(r"^([\w.-]+)==([^ ]+)", (ROOT / name).read_text(), re.MULTILINE):
        pins.setdefault(package, set()).add(version)
    return pins


@pytest.mark.parametrize("cuda", [12, 13])
def test_a_container_installs_the_locked_versions(cuda):
    text = (ROOT / "containers" / f"cuda{cuda}.Dockerfile").read_text()
    steps = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    copied = {word for step in steps if step[0] == "COPY" for word in step[1:-1]}
    assert copied == {*SOURCES, f"requirements/cuda{cuda}.txt"}
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for name in copied:
        assert (ROOT / name).exists()
        assert any(Path(name).match(pattern) for pattern in kept), name
    base = re.search(r"^FROM python:([\d.]+)-slim$", text, re.MULTILINE)
    assert base
    assert base[1] in SpecifierSet(PROJECT["requires-python"])
    assert f'ENTRYPOINT ["{next(iter(PROJECT["scripts"]))}"]' in text
    assert f"pip install --no-cache-dir -r requirements/cuda{cuda}.txt" in text
    pins, locked = read_pins(f"requirements/cuda{cuda}.txt"), read_pins("requirements.txt")
    assert {f"jax-cuda{cuda}-plugin", f"jax-cuda{cuda}-pjrt"} <= pins.keys()
    assert pins[f"jax-cuda{cuda}-plugin"] == locked["jax"]
    assert {name: versions for name, versions in pins.items() if name in locked} == {
        name: versions for name, versions in locked.items() if name in pins
    }
    assert {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]} <= pins.keys()


@pytest.mark.parametrize(
    ("said", "cuda"),
    [
        ("580.95.05\n580.95.05", "cuda13"),
        ("535.161.08", "cuda12"),
        ("No devices were found", None),
        ("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.161", None),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", None),
    ],
)
def test_make_installs_cuda_for_a_driver_that_has_a_version(said, cuda, tmp_path):
    """nvidia-smi writes its errors to stdout."""
    (tmp_path / "nvidia-smi").write_text(f'#!/bin/sh\necho "{said}"\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = ["make", "-n", "-B", ".venv/installed"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert re.findall(r"-r requirements/(\w+)\.txt", done.stdout) == ([cuda] if cuda else [])
    assert done.stderr == ""


def test_the_programs_of_the_makefile_run_by_the_awk_of_macos():
    """It takes one word behind `print >`: of several it says `syntax error`, unless they are in brackets."""
    assert not re.search(r'print > "[^"]*" [^}]', (ROOT / "Makefile").read_text())


@pytest.mark.parametrize("path", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda path: path.stem)
def test_users_get_the_versions_that_are_tested(path):
    """`make lock` makes all files from one; and a lock names no package index."""
    tested, pins = read_pins("requirements/tests.txt"), read_pins(path.relative_to(ROOT))
    assert pins
    assert {name: versions for name, versions in pins.items() if name in tested and versions != tested[name]} == {}
    assert pins.keys() - tested.keys() == set() or path.stem.startswith("cuda")
    assert "://" not in path.read_text()


def test_the_tests_have_every_extra():
    """No test is left out because a package of PyPI is missing; CUDA's come where there is an NVIDIA driver."""
    extras, tested, new = PROJECT["optional-dependencies"], {"tests"}, {"tests"}
    while new:
        words = [Requirement(line) for name in new for line in extras[name]]
        new = {extra for word in words if word.name == PROJECT["name"] for extra in word.extras} - tested
        tested |= new
    assert extras.keys() - tested == {"cuda12", "cuda13"}
    assert read_pins("requirements.txt").items() <= read_pins("requirements/tests.txt").items()


def test_the_table_of_optional_packages_is_that_of_the_extras():
    assert {*OPTIONAL.values()} | NOT_IMPORTED == PROJECT["optional-dependencies"].keys()


def imported_names(node: ast.AST) -> set[str]:
    """Parts of the names in an import statement: {"tunix", "launch", "ray_cluster"}."""
    if isinstance(node, ast.Import):
        return {part for alias in node.names for part in alias.name.split(".")}
    if isinstance(node, ast.ImportFrom):
        return {*(node.module or "").split("."), *(alias.name for alias in node.names)}
    return set()


def imported_packages(node: ast.AST) -> set[str]:
    """Packages in an import statement."""
    if isinstance(node, ast.ImportFrom):
        return {(node.module or "").partition(".")[0]}
    return {alias.name.partition(".")[0] for alias in node.names} if isinstance(node, ast.Import) else set()


def early_imports(path: Path) -> list[ast.AST]:
    """Import statements that run when a file is imported: not in a function, not for type checkers alone."""
    tree, late = ast.parse(path.read_text()), set[ast.AST]()
    for node in ast.walk(tree):
        is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_for_types:
            late |= {*ast.walk(node)}
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) and node not in late]


def test_optional_packages_are_imported_when_they_are_asked_for():
    """A file that needs one of them on its own import (ray_cluster.py) is itself imported in functions alone."""
    early = {path: early_imports(path) for path in SOURCE_FILES}
    needing = {path for path, nodes in early.items() for node in nodes if imported_packages(node) & OPTIONAL.keys()}
    for path in SOURCE_FILES:
        for node in early[path]:
            names = imported_names(node) & {needed.stem for needed in needing - {path}}
            assert path in needing or not names, f"{path} imports {names}, and with it an optional package"


def test_a_missing_package_is_a_line_with_its_extra():
    """Each file that imports one of them says how to install it; tests of the parts read these lines."""
    for path in SOURCE_FILES:
        text = path.read_text()
        used = {name for node in ast.walk(ast.parse(text)) for name in imported_packages(node)} & OPTIONAL.keys()
        # A subject in several files has its check in the first one: ray_cluster.py in ray.py.
        texts = text + "".join(other.read_text() for other in path.parent.glob(f"{path.stem.partition('_')[0]}.py"))
        for name in used:
            assert f"pip install 'tunix-trainer[{OPTIONAL[name]}]'" in texts, f"{path}: {name}"
