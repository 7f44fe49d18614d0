"""Kinds of matrix products: each gives what the equation says, and the mesh's devices choose one."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.harness import SMALL

from tunix.config.compose import compose
from tunix.models import matmul
from tunix.models.matmul import FEW_ROWS, MATMUL, product, product_of_few_rows
from tunix.sharding.table import Equation
from tunix.training.choices import build_layout, build_mesh

ERRORS = {
    "fp8": 1.5,
    "mxfp8": 1.5,
}  # of sums of up to 24 products of numbers around 1, each rounded to three bits of fraction
SIZES = {"T": 1, "D": 8, "N": 4, "H": 6, "V": 10}


@pytest.mark.parametrize("kind", MATMUL)
def test_every_kind_multiplies_as_its_equation_says(kind):
    """On both sides of the number of rows from which a kind may differ; heads and words are split over tp."""
    cfg = compose([*SMALL, "model.mesh_shape=[[4,2],[fsdp,tp]]"]).config
    mesh = build_mesh(cfg)
    layout = build_layout(cfg, mesh)
    with jax.set_mesh(mesh):
        for text in ("BTD,DNH->BTNH", "BTNH,NHD->BTD", "BTD,VD->BTV"):
            equation = Equation(text)
            for rows in (4, 2 * FEW_ROWS):
                x, w = (
                    np.random.default_rng(0).normal(size=[(SIZES | {"B": rows})[dim_name] for dim_name in dim_names])
                    for dim_names in (equation.x, equation.w)
                )
                laid = np.einsum(f"{equation.w}->{MATMUL[kind].order(equation).w}", w)
                given = jax.device_put(x.astype("float32"), jax.NamedSharding(mesh, layout.activation(equation.x)))
                index = layout.in_use(MATMUL[kind].order(equation))
                weight = jax.device_put(laid.astype("float32"), jax.NamedSharding(mesh, jax.P(*index.partitions)))
                y = jax.jit(lambda x, w, equation=equation: product(equation, x, w, layout, kind))(given, weight)
                assert jax.typeof(y).sharding.spec == layout.activation(equation.y)
                np.testing.assert_allclose(y, np.einsum(text, x, w), rtol=1e-5, atol=ERRORS.get(kind, 1e-5))


def test_a_wide_gradient_is_not_rounded_to_the_dtype_of_products():
    """A weight of 16-bit numbers in float32 gives the y and the d_x of 16 bits, and its gradient keeps all digits."""
    rng, equation = np.random.default_rng(0), Equation("BTD,DF->BTF")
    x, w, g = (jnp.asarray(rng.normal(size=size), "bfloat16") for size in ((4, 8, 16), (16, 8), (4, 8, 8)))

    def run(kind, w):
        y, vjp = jax.vjp(lambda x, w: MATMUL[kind].multiply(equation, x, w, jax.P(None, None, None)), x, w)
        return y, *vjp(g)

    with jax.set_mesh(build_mesh(compose([*SMALL, "model.mesh_shape=[[8],[fsdp]]"]).config)):
        y, d_x, d_w = run("wide_gradient", w.astype("float32"))
        plain_y, plain_d_x, rounded = run("plain", w)
    assert (y == plain_y).all()
    assert (d_x == plain_d_x).all()
    assert d_w.dtype == "float32"
    exact = np.einsum("btd,btf->df", np.asarray(x, "float64"), np.asarray(g, "float64"))
    np.testing.assert_allclose(d_w, exact, rtol=1e-5, atol=1e-5)
    assert abs(np.asarray(rounded, "float64") - exact).max() > 1e-3


def test_large_arrays_are_multiplied_as_matrices_on_each_mesh_that_allows_it(monkeypatch):
    """The result and both gradients are those of the equation; tokens that lie on several devices stay a dimension."""
    monkeypatch.setattr(matmul, "MANY_NUMBERS", 4 * 8 * 8)
    meshes = (("[[4,2],[fsdp,tp]]", 8, True), ("[[4,2],[fsdp,cp]]", 8, False), ("[[8],[fsdp]]", 2, False))
    for mesh_shape, length, as_matrices in meshes:
        cfg = compose([*SMALL, f"model.mesh_shape={mesh_shape}"]).config
        mesh = build_mesh(cfg)
        layout, rng = build_layout(cfg, mesh), np.random.default_rng(0)
        with jax.set_mesh(mesh):
            for text in ("BTD,DNH->BTNH", "BTNH,NHD->BTD", "BTD,VD->BTV"):
                equation = Equation(text)
                sizes = SIZES | {"B": 8, "T": length, "H": 2, "V": 8}
                x, w, g = (
                    rng.normal(size=[sizes[dim_name] for dim_name in dim_names]).astype("float32")
                    for dim_names in (equation.x, equation.w, equation.y)
                )
                places = [layout.activation(equation.x), layout.stored(equation), layout.activation(equation.y)]
                arrays = [
                    jax.device_put(array, jax.NamedSharding(mesh, index))
                    for array, index in zip((x, w, g), places, strict=True)
                ]

                def both(x, w, g, equation=equation, layout=layout):
                    y, back = jax.vjp(lambda x, w: product(equation, x, layout.gather(w, equation), layout), x, w)
                    return y, *back(g)

                run = jax.jit(both).lower(*arrays)
                products_of_matrices = run.as_text().count("contracting_dims = [0] x [0]")
                assert products_of_matrices == as_matrices, (mesh_shape, text)  # that of the weight's gradient
                y, d_x, d_w = run.compile()(*arrays)
                np.testing.assert_allclose(y, np.einsum(text, x, w), rtol=1e-5, atol=1e-5)
                of_x, of_w = (f"{equation.y},{equation.w}->{equation.x}", f"{equation.x},{equation.y}->{equation.w}")
                np.testing.assert_allclose(d_x, np.einsum(of_x, g, w), rtol=1e-5, atol=1e-5)
                np.testing.assert_allclose(d_w, np.einsum(of_w, x, g), rtol=1e-5, atol=1e-5)


def test_only_cpus_turn_weights_for_few_rows():
    kinds = {}
    for platform in ("cpu", "gpu"):
        device = jax.sharding.AbstractDevice(device_kind=platform, num_cores=None, platform=platform)
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
            kinds[platform] = product_of_few_rows()
    assert kinds == {"cpu": "few_rows", "gpu": "plain"}


@pytest.mark.parametrize(
    ("text", "x_shape", "w_shape", "dtype"),
    [
        ("BTD,DF->BTF", (16, 1, 64), (256, 64), "float32"),
        ("BTNH,NHD->BTD", (16, 1, 4, 16), (256, 4, 16), "float32"),
        ("BTNH,NHD->BTD", (16, 1, 4, 16), (256, 4, 16), "bfloat16"),
    ],
)
def test_the_weight_comes_first_where_rows_are_few(text, x_shape, w_shape, dtype):
    """XLA's CPU backend copies the second factor of a product: that must be the small one."""
    equation, mesh = Equation(text), jax.make_mesh((1,), ("x",))
    with jax.set_mesh(mesh):
        inputs = (jax.ShapeDtypeStruct(shape, dtype) for shape in (x_shape, w_shape))
        multiply = jax.jit(lambda x, w: MATMUL["few_rows"].multiply(equation, x, w, jax.P(None, None, None)))
        compiled = multiply.lower(*inputs).compile().as_text()
    dots = [line for line in compiled.splitlines() if " dot(" in line]
    assert dots
    assert all("[256,16]" in line.split(" dot(")[0] for line in dots), dots
    users = [line for line in compiled.splitlines() if re.search(r"\(.*%w\.1\b", line) and not line.startswith("ENTRY")]
    assert users
    assert all(re.search(r" bitcast\(| dot\(|__ynn_fusion", line) for line in users), users  # nothing turns it
