"""Many 16-bit numbers are added up in float32: bfloat16 has 8 bits, in which a thousand ones add up to 256."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from models.test_cpu_library import assemble_in_16_bits
from support.harness import program

FEW = 8  # numbers that may be added up as they are, like those of the experts of a token


def is_narrow(value: Any) -> bool:
    return getattr(value.aval, "dtype", None) in (jnp.bfloat16, jnp.float16)


def count_added(equation: Any) -> float:
    """Return how many numbers an operation may add up to one; 1 where it adds nothing up."""
    shape, params = getattr(equation.invars[0].aval, "shape", ()) if equation.invars else (), equation.params
    match equation.primitive.name:
        case "reduce_sum":
            return math.prod(shape[axis] for axis in params["axes"])
        case "cumsum":
            return shape[params["axis"]]
        case "scatter-add":
            return 1 if params["unique_indices"] else math.inf
    return 1


def list_bodies(equation: Any) -> list[Any]:
    """Return the programs that an operation runs."""
    leaves = jax.tree.leaves(equation.params, is_leaf=lambda each: hasattr(each, "eqns") or hasattr(each, "jaxpr"))
    return [each for each in (getattr(leaf, "jaxpr", leaf) for leaf in leaves) if hasattr(each, "eqns")]


def list_narrow_sums(jaxpr: Any) -> Iterator[str]:
    """Yield the operations of a program that add up many 16-bit numbers, and loops that add to a sum of 16 bits."""
    for equation in jaxpr.eqns:
        if any(map(is_narrow, equation.invars)) and count_added(equation) > FEW:
            yield str(equation)
        bodies = list_bodies(equation)
        if equation.primitive.name == "scan":
            (body,) = bodies
            for each in body.eqns:
                is_sum = each.primitive.name in ("add", "add_any") and is_narrow(each.outvars[0])
                if is_sum and each.outvars[0] in body.outvars and {*each.invars} & {*body.invars}:
                    yield f"in a loop: {each}"
        for each in bodies:
            yield from list_narrow_sums(each)


@pytest.mark.nightly(but=["deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "gpt2", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "llama4", "apertus"]
)
def test_gradients_of_a_family(family):
    """Of lookups, sinks, the rotated keys that heads share, gates of shared experts, and shares of a router."""
    mesh, built = assemble_in_16_bits(family, rank=0)
    with jax.set_mesh(mesh):
        arguments = built.abstract["params"], built.abstract_batch, jax.ShapeDtypeStruct((1,), jnp.int32)
        traced = jax.jit(built.gradients()).trace(*arguments)
    assert not [*list_narrow_sums(traced.jaxpr.jaxpr)]


@pytest.mark.nightly(but=["task=dpo"])
@pytest.mark.parametrize("words", ["task=dpo", "task=kto", "task=grpo sampling.max_new_tokens=16", "task=embed"])
def test_steps_of_a_task(words):
    """The head's table, whose gradient is a sum over chunks of positions."""
    made = program("training.mixed_precision=bf16", *words.split())
    with jax.set_mesh(made.mesh):
        traced = jax.jit(made.step).trace(made.built.abstract, made.built.abstract_batch)
    assert not [*list_narrow_sums(traced.jaxpr.jaxpr)]


def test_sums_of_16_bits_are_found():
    """A lookup's gradient, and the sum of those of four chunks."""

    def add_up(table, numbers):
        look_up = jax.checkpoint(lambda chunk: jnp.sum(table.at[chunk].get().astype(jnp.float32)))
        return jnp.sum(jax.lax.map(look_up, numbers))

    table, numbers = jax.ShapeDtypeStruct((9, 16), jnp.bfloat16), jax.ShapeDtypeStruct((4, 5), jnp.int32)
    in_loop, lookup = list_narrow_sums(jax.jit(jax.grad(add_up)).trace(table, numbers).jaxpr.jaxpr)
    assert "in a loop" in in_loop
    assert "scatter-add" in lookup
