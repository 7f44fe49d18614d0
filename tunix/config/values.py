"""The folder that holds the values of all keys."""

from pathlib import Path

PACKAGED = Path(__file__).parents[1] / "conf"  # in an installed wheel
CONF = PACKAGED if PACKAGED.is_dir() else Path(__file__).parents[2] / "conf"
