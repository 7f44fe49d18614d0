"""What a remat policy keeps is not computed again in the backward pass, whoever wrote its backward rule."""

import re
from functools import partial

import jax
import jax.extend.core
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from support.harness import SGD, TWO_DEVICES, program

from tunix.base.dotted_path import import_object
from tunix.base.errors import UserError
from tunix.models import matmul
from tunix.models.attention_mask import row_mask_rule
from tunix.models.table import KERNELS

ONE = ["model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true"]


def dummy_kernel(q, k, v, seen):
    """Means of values, by a kernel with a backward rule of its own; `erf` marks its forward pass."""

    @jax.custom_vjp
    def kernel(q, k, v):
        return forward(q, k, v)[0]

    def forward(q, k, v):
        out = jax.lax.erf(q) + jnp.repeat(v, q.shape[2] // v.shape[2], 2)
        return (checkpoint_name(out, "attention"),) * 2

    def backward(out, g):
        group = out.shape[2] // k.shape[2]
        return g * out, jnp.zeros_like(k), g.reshape(*k.shape[:2], k.shape[2], group, k.shape[3]).sum(3)

    kernel.defvjp(forward, backward)
    return kernel(q, k, v)


def dummy_product(equation, x, w, spec):
    """A product with a backward rule of its own; `cbrt` marks its forward pass."""

    def plain(x, w):
        return jnp.einsum(equation.text, x, w, out_sharding=spec)

    @jax.custom_vjp
    def multiplied(x, w):
        return jax.lax.cbrt(plain(x, w))

    multiplied.defvjp(lambda x, w: (jax.lax.cbrt(plain(x, w)), (x, w)), lambda kept, g: jax.vjp(plain, *kept)[1](g))
    return multiplied(x, w)


def count(jaxpr, primitive: str) -> int:
    """Times that a primitive stands in a program and in the programs inside it."""
    inner = [sub for equation in jaxpr.eqns for sub in jax.extend.core.jaxprs_in_params(equation.params)]
    return sum(equation.primitive.name == primitive for equation in jaxpr.eqns) + sum(
        count(sub, primitive) for sub in inner
    )


def gradient(*overrides: str):
    """The program of the gradient of a small model, as JAX traces it."""
    small = program(*ONE, *overrides)
    with jax.set_mesh(small.mesh):
        return jax.make_jaxpr(jax.grad(small.loss))(small.state["params"]).jaxpr


@pytest.mark.parametrize(("remat", "times"), [("none", 1), ("dots", 1), ("attention", 1), ("full", 2)])
def test_a_kernel_that_is_kept_runs_once(remat, times):
    assert count(gradient(f"model.attention={__name__}:dummy_kernel", f"training.remat={remat}"), "erf") == times


@pytest.mark.parametrize(("remat", "again"), [("none", 0), ("dots", 0), ("full", 7)])
def test_a_product_that_is_kept_runs_once(remat, again, monkeypatch):
    """Seven products in a block; the logits run once, along with their gradient."""
    monkeypatch.setitem(matmul.MATMUL, "plain", matmul.ProductKind(dummy_product))
    assert count(gradient(f"training.remat={remat}"), "cbrt") == 7 + again + 1


@pytest.mark.parametrize(("every", "again"), [(1, 7), (3, 7)])
def test_one_block_of_several_computes_again(every, again, monkeypatch):
    """The scan over 3 layers has one block in its program, or a group of three, of which the first computes again."""
    monkeypatch.setitem(matmul.MATMUL, "plain", matmul.ProductKind(dummy_product))
    found = count(gradient("training.remat=full", f"training.remat_every={every}"), "cbrt")
    assert found == every * 7 + again + 1


def test_projections_are_kept_and_the_width_of_the_mlp_is_not(monkeypatch):
    """Two of seven products run again: gate and up."""
    monkeypatch.setitem(matmul.MATMUL, "plain", matmul.ProductKind(dummy_product))
    assert count(gradient("training.remat=projections"), "cbrt") == 7 + 2 + 1


def test_activations_on_the_host():
    """What a block takes and what the policy keeps of it go to the host, and nothing else of a block is kept."""
    text = str(gradient("training.remat=attention", "training.offload=activations"))
    kept = {re.sub("@[^,]*", "", re.sub(r"@\([^)]*\)", "", shape)) for shape in re.findall(r"<host>\[([^\]]+)\]", text)}
    assert kept == {"16,32,32", "3,16,32,32", "16,32,4,8", "3,16,32,4,8"}


def test_groups_of_layers_take_weights_that_are_gathered_once_a_step():
    """Their types say that their gradients are parts of sums, which a plain reshape refuses."""
    step = program(*TWO_DEVICES, *SGD, "training.sharding_strategy=shard_grad_op", "training.remat_every=3")
    with jax.set_mesh(step.mesh):
        jax.eval_shape(step.step, step.built.abstract, step.built.abstract_batch)


def test_layers_in_groups_that_do_not_divide_them():
    with pytest.raises(UserError, match=r"training.remat_every=2 does not divide 3 layers in a row; it may be 1, 3"):
        program(*ONE, "training.remat_every=2")


def test_devices_without_memory_of_the_host_are_refused(monkeypatch):
    monkeypatch.setattr("tunix.training.train_spec.has_host_memory", lambda mesh: False)
    with pytest.raises(
        UserError, match=r"training.offload=optimizer needs devices that read .* pinned memory, and cpu"
    ):
        program(*ONE, "training.offload=optimizer")


@pytest.mark.parametrize("remat", ["attention", "full"])
def test_the_kernel_on_ranges_keeps_sums_beside_outputs(remat, monkeypatch):
    """Without the sums its forward pass would run again. Rows of 32 tokens are filled up to 128."""
    monkeypatch.setattr(jax, "shard_map", partial(jax.shard_map, check_vma=False))  # as in test_flash.py
    small = program(*ONE, "model.attention=test_flash:interpreted", f"training.remat={remat}")
    outputs, sums = (3, 16, 128, 4, 8), (3, 16, 4, 128)
    shapes = small.kept_shapes()
    assert (outputs in shapes, sums in shapes) == (remat == "attention",) * 2


@pytest.mark.parametrize("name", sorted(KERNELS.keys() - {"cudnn"}))  # cuDNN's cannot be traced without cuDNN
def test_every_kernel_names_its_result(name):
    """Traced for a GPU that is not there."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
    rows = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)

    def pull_back(q, k, v):
        seen = row_mask_rule(jnp.zeros((1, 256), jnp.int32), 256)
        return jax.vjp(lambda *qkv: import_object(KERNELS[name])(*qkv, seen), q, k, v)[1](q)

    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
        assert "name=attention" in str(jax.make_jaxpr(pull_back)(rows, rows, rows))


def test_gathered_weights_are_not_kept():
    """The backward pass of remat=none has as many arrays of a weight's shape as that of remat=full."""

    def weights(remat: str) -> int:
        small = program("model.mesh_shape=[[8],[fsdp]]", f"training.remat={remat}")
        return small.kept_shapes().count(small.state["params"]["blocks"]["mlp"]["up"]["w"].shape)

    assert weights("none") == weights("full")
