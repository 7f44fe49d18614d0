"""The code of docs/extending.md, as a user copies it into a file."""

import re

from support.harness import ROOT

PAGE = (ROOT / "docs" / "extending.md").read_text()


def my_parts() -> str:
    """Return the Python blocks of the page that bring a part, one after the other."""
    parts = PAGE.partition("## Search")[0]  # behind it: a program of one's own
    return "\n\n".join(re.findall(r"```python\n(.*?)```", parts, re.DOTALL))


def my_command() -> str:
    """Return the training command of the page in one line."""
    return re.findall(r"```sh\n(python run_training.py .*?)```", PAGE, re.DOTALL)[0].replace("\\\n", " ")


def my_values() -> str:
    """Return the file of a size of the family on the page."""
    return re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0]
