"""Compile a product of 8-bit floats and its gradients for a chip that is not there: compile_fp8.py CHIP DTYPE.

Prints the dtypes of both factors of each product of matrices in the program, and of their scales, sorted.
"""

import re
import sys

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from tunix.costs.devices import read_topology
from tunix.models.matmul import MATMUL
from tunix.plan.compile import describe_devices
from tunix.sharding.table import Equation

mesh = jax.make_mesh(
    (1,), ("fsdp",), axis_types=(AxisType.Explicit,), devices=describe_devices(read_topology(f"{sys.argv[1]}:1"))
)
WHOLE = jax.P(None, None, None)


def results(x, w, g):
    multiply = MATMUL[sys.argv[2]].multiply
    y, back = jax.vjp(lambda x, w: multiply(Equation("BTD,DF->BTF"), x, w, WHOLE), x, w)
    return y, *back(g)


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=jax.NamedSharding(mesh, jax.P()))


with jax.set_mesh(mesh):
    hlo = jax.jit(results).lower(shape(2, 512, 256), shape(256, 1024), shape(2, 512, 1024)).compile().as_text()
dtypes = dict(re.findall(r"%([\w.\-]+) = (\w+)\[", hlo))
products = re.findall(r" (?:scaled-)?dot\(([^)]*)\)", hlo)
print(*sorted(" ".join(dtypes[name] for name in re.findall(r"%([\w.\-]+)", each)) for each in products), sep="\n")
