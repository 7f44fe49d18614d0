"""Plain values as YAML text that OmegaConf reads back as the same values."""

from typing import Any

import yaml


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes by libyaml, where PyYAML has it: OmegaConf's own way takes ten times as long."""

    def ignore_aliases(self, data: Any) -> bool:
        return True  # a list that is there twice is written twice: easier to read and to change


def _represent_text(dumper: Any, text: str) -> yaml.ScalarNode:
    # PyYAML quotes what it would read as another type. OmegaConf reads more numbers, `1e5` among them, and other
    # readers of YAML more words for true and false.
    style = "'" if _is_number(text) or text in {"y", "Y", "n", "N"} else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_Dumper.add_representer(str, _represent_text)


def format_yaml(values: Any) -> str:
    """Return the text of plain values, in their order."""
    return yaml.dump(values, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)
