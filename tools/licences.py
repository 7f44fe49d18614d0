"""Licences of the packages that tunix needs at run time: `python -m tools.licences` writes docs/licences.md.

They are read from the metadata of what is installed, from the dependencies of pyproject.toml downwards, without extras.
Exit code 1 for a package whose licence is not in ALLOWED: read it, and add it there or take another package.
"""

import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licences.md"
# Licences under which a package may be used, changed and passed on with a program of any licence.
ALLOWED = {
    "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "MIT", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Zlib",
}  # fmt: skip
# Names in older metadata, and their SPDX names.
SPDX = {
    "Apache 2.0": "Apache-2.0", "Apache License": "Apache-2.0", "Apache Software License": "Apache-2.0",
    "3-Clause BSD License": "BSD-3-Clause", "BSD": "BSD-3-Clause", "BSD License": "BSD-3-Clause",
    "MIT License": "MIT",
}  # fmt: skip
HEADING = """# Licences

tunix itself is under the Apache License 2.0. This table lists the packages that it needs at run time, without the
extras of `pyproject.toml`, and their licences as their authors name them. `python -m tools.licences` renews it, and
`make lint` fails for a package whose licence is not one of: {allowed}.

| package | licence |
|---|---|
"""


def find_packages(requirements: Iterable[str], found: dict[str, Distribution] | None = None) -> dict[str, Distribution]:
    """Return the installed packages that requirements name, and all that those need, by name."""
    found = {} if found is None else found
    for text in requirements:
        requirement = Requirement(text)
        extras = requirement.extras or {""}
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found[name] = package = distribution(requirement.name)
        own = [Requirement(each) for each in package.requires or []]
        needed = [each for each in own if not each.marker or any(each.marker.evaluate({"extra": e}) for e in extras)]
        for each in needed:
            each.marker = None
        find_packages(map(str, needed), found)
    return found


def read_licence(package: Distribution) -> str:
    """Return the licence that the metadata of a package name, as an SPDX expression where it is known."""
    metadata = package.metadata
    if expression := metadata.get("License-Expression"):
        return expression
    classifiers = [each.rpartition(" :: ")[2] for each in metadata.get_all("Classifier") or [] if "License ::" in each]
    lines = (metadata.get("License") or "").strip().splitlines()
    name = lines[0].strip() if lines else ""
    if name in SPDX or is_allowed(name):
        return SPDX.get(name, name)
    names = [re.split(r"\s{2,}", name)[0], *classifiers]  # some have the text of the licence in place of its name
    return next((SPDX[each] for each in names if each in SPDX), name or "unknown")


def is_allowed(expression: str) -> bool:
    """Return whether each licence of an SPDX expression is allowed; of several to choose from, one is enough."""
    return all(any(each.strip(" ()") in ALLOWED for each in part.split(" OR ")) for part in expression.split(" AND "))


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    licences = {name: read_licence(each) for name, each in sorted(find_packages(project["dependencies"]).items())}
    rows = "".join(f"| `{name}` | {licence} |\n" for name, licence in licences.items())
    PAGE.write_text(HEADING.format(allowed=", ".join(sorted(ALLOWED))) + rows)
    refused = [f"{name}: {licence}" for name, licence in licences.items() if not is_allowed(licence)]
    print("\n".join(f"licence not allowed by tools/licences.py: {each}" for each in refused), end="")
    return bool(refused)


if __name__ == "__main__":
    sys.exit(main())
