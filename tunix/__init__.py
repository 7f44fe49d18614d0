"""tunix: one command trains language models with JAX, on whatever devices there are.

`tunix.train(config_or_overrides)` runs without the command line:
`tunix.train(["model=tiny", "training.max_steps=20"])`. `tunix.load_pretrained(DIR_OR_RUN, dtype="float32")` gives a
model: called with tokens [B, T] int32, it gives logits [B, T, V] float32.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "train":  # imported when asked for: jax takes seconds, a typo in a config should not
        return importlib.import_module("tunix.train")
    if name == "load_pretrained":
        return importlib.import_module("tunix.pretrained").load_pretrained
    raise AttributeError(f"module 'tunix' has no attribute {name!r}")
