"""The code of docs/extending.md, as a user copies it into a file."""

import re

from support.harness import ROOT

PAGE = (ROOT / "docs" / "extending.md").read_text()


def my_parts() -> str:
    """Return all Python blocks of the page, one after the other."""
    return "\n\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))


def my_command() -> str:
    """Return the training command of the page in one line."""
    return re.findall(r"```sh\n(python run_training.py .*?)```", PAGE, re.DOTALL)[0].replace("\\\n", " ")


def my_values() -> str:
    """Return the file of values of a family on the page."""
    return re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0]
