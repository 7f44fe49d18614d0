"""Hooks of mkdocs that add pages to the site: the README as its start, the changelog, one page of API for each folder.

Pages link to files of the repository, like `../tunix/training/step.py`. On the site such a link leads to the API of
that module; where there is none (a test, a YAML file), its text stays without a link.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tunix"
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the API pages under Reference."""
    for entry in config.nav or []:
        if "Reference" in entry:
            entry["Reference"].append({"API": [f"api/{name}.md" for name in list_modules()]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are no files of docs/."""
    pages = {"index.md": (ROOT / "README.md").read_text(), "changelog.md": (ROOT / "CHANGELOG.md").read_text()}
    for name, modules in list_modules().items():
        pages[f"api/{name}.md"] = f"# {name}\n\n" + "\n\n".join(f"::: {module}" for module in modules) + "\n"
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead each link to a file of the repository to the page of the site that has it."""
    source = page.file.src_uri
    folder = ROOT if source in ("index.md", "changelog.md") else (ROOT / "docs" / source).parent
    up = "../" * source.count("/")
    return LINK.sub(lambda found: _convert(found[1], found[2], folder, up), markdown)


def list_modules() -> dict[str, list[str]]:
    """Return {page: modules} of the package: the top's under "tunix", a folder's under its name."""
    pages: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        index = path.relative_to(PACKAGE)
        if path.stem.startswith("__") and index.name != "__init__.py":
            continue
        if index.name == "__init__.py" and len(index.parts) > 1 and not path.read_text().strip():
            continue
        page, module = _locate(index)
        pages.setdefault(page, []).append(module)
    return pages


def _convert(text: str, target: str, folder: Path, up: str) -> str:
    """Return one link as the site has it; `target` is relative to `folder`, and `up` leads to the root of the site."""
    path, _, anchor = target.partition("#")
    if not path or "://" in path or target.startswith("mailto:"):
        return f"[{text}]({target})"
    file = (folder / path).resolve()
    if file.is_relative_to(ROOT / "docs"):
        return f"[{text}]({up}{file.relative_to(ROOT / 'docs')}{'#' + anchor if anchor else ''})"
    if file == ROOT / "README.md":
        return f"[{text}]({up}index.md)"
    if file == PACKAGE or not file.is_relative_to(PACKAGE):
        return text
    index = file.relative_to(PACKAGE)
    if file.is_dir():
        return f"[{text}]({up}api/{index}.md)"
    page, module = _locate(index)
    return f"[{text}]({up}api/{page}.md#{module})"


def _locate(index: Path) -> tuple[str, str]:
    """Return the page of the API and the name of the module of a file, whose path is relative to the package."""
    module = ".".join(("tunix", *index.with_suffix("").parts)).removesuffix(".__init__")
    return index.parts[0] if len(index.parts) > 1 else "tunix", module
