"""What users bring by dotted path, in the least form: a source of documents and an optimizer."""

from collections.abc import Iterator

import optax


def documents(count: int) -> Iterator[str]:
    for number in range(count):
        yield f"document {number} " * 40


def optimizer(decay: float) -> optax.GradientTransformation:
    return optax.rmsprop(1.0, decay)
