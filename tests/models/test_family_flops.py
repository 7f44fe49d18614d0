"""FLOPs of each family: what is derived equals the products of the program that computes its logits."""

import math
from collections.abc import Iterator
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding
from models.test_parity import MODELS, PARITY
from support.harness import program
from support.images import SEES, SEES_ANY_SIZE, SEES_TILES

from tunix.config.pretrained_config import trained_model
from tunix.data.batches import IMAGE_FIELDS
from tunix.models.flops import (
    attended_tokens,
    chunk_flops_per_token,
    forward_flops_per_token,
    forward_tower_flops,
    tower_flops,
)
from tunix.models.vision import Images
from tunix.sharding.layout import STRATEGIES, Layout
from tunix.sharding.mesh import device_mesh
from tunix.training.state import abstract_params, describe

ROWS, LENGTH = 2, 24


def is_repeated_vector(equation) -> bool:
    vector, result = equation.invars[0].aval, equation.outvars[0].aval
    for_tokens = result.ndim > 2 and result.shape[:2] == (ROWS, LENGTH)
    return for_tokens and vector.size > 1 and not {0, 1} & set(equation.params["broadcast_dimensions"])


def products(jaxpr, with_biases: bool = True) -> Iterator[float]:
    """Yield the FLOPs of each product of a program, those in a loop as often as it runs.

    A vector at work is a product that sums over nothing (a bias), or a vector that is repeated for every token (the
    scale of a norm). The derived FLOPs have both. A single number that scales an activation (xIELU) is none.
    """
    for each in jaxpr.eqns:
        if each.primitive.name == "dot_general":
            (summed, _), _ = each.params["dimension_numbers"]
            left, right = (value.aval.shape for value in each.invars)
            num_summed = math.prod(left[dim] for dim in summed)
            scales = 1 in (math.prod(left), math.prod(right)) or (num_summed == 1 and not with_biases)
            yield 0.0 if scales else 2.0 * math.prod(each.outvars[0].aval.shape) * num_summed
        elif each.primitive.name == "broadcast_in_dim" and is_repeated_vector(each):
            yield 2.0 * math.prod(each.outvars[0].aval.shape)
        elif each.primitive.name.startswith("ragged_dot"):  # a row meets the weights of one expert
            yield 2.0 * math.prod(each.outvars[0].aval.shape) * each.invars[0].aval.shape[-1]
        elif each.primitive.name == "triangular_solve":  # half of the matrix is zero
            yield 1.0 * math.prod(each.outvars[0].aval.shape) * each.invars[0].aval.shape[-1]
        times = each.params.get("length", 1) if each.primitive.name == "scan" else 1
        for inner in jaxprs_in_params(each.params):
            yield times * sum(products(inner, with_biases))


CASES = [(name, False) for name in MODELS] + [(name, True) for name in ("deepseek_v3", "glm4_moe", "qwen3_next")]


@pytest.mark.parametrize(("name", "mtp"), CASES, ids=[f"{name} with mtp" if mtp else name for name, mtp in CASES])
def test_flops_of_a_forward_pass(name, mtp):
    """The kernel computes the scores of all pairs; those that no query sees are not among what is derived."""
    cfg = trained_model(PARITY / name, [[1], ["fsdp"]], mtp=mtp)
    mesh = device_mesh(cfg.mesh_shape, cfg.dims, allow_idle=True)
    kernels = tuple((heads.dim_names[0], "xla") for heads in cfg.head_kinds)
    layout = Layout(STRATEGIES["no_shard"], frozenset(), "float32", "float32", "float32", kernels=kernels)
    layout = layout.with_all_layers()
    with jax.set_mesh(mesh):
        arch = describe(cfg, layout)
        params = abstract_params(arch, mesh)
        of_rows = NamedSharding(mesh, layout.activation("BT"))
        tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), np.int32, sharding=of_rows)

        def compute(params, tokens):
            model = arch.module(params)
            if not mtp:
                return model(tokens)
            vocab_weights = model.vocab_weights()
            hidden, _ = model.hidden(vocab_weights, tokens)
            further, _ = model.hidden_further(vocab_weights, hidden, tokens, tokens, tokens)
            return model.logits(vocab_weights, hidden), model.logits(vocab_weights, further)

        traced = jax.jit(compute).trace(params, tokens)
    unseen = 0.0
    for each in (cfg, cfg.mtp_model) if mtp else (cfg,):
        for heads, layers in each.head_kinds.items():
            unseen_pairs = len(layers) * LENGTH - attended_tokens(each, LENGTH, layers)
            unseen += 2.0 * each.num_heads * (heads.dim + heads.value_dim) * unseen_pairs
    derived = forward_flops_per_token(cfg, arch.num_active, LENGTH) + chunk_flops_per_token(cfg, LENGTH) + unseen
    assert sum(products(traced.jaxpr.jaxpr)) / (ROWS * LENGTH) == pytest.approx(derived, rel=0.01)


@pytest.mark.parametrize(("kind", "tokens"), [("window", [1, 2, 3, 4, 4, 4]), ("chunk", [1, 2, 3, 4, 1, 2])])
def test_tokens_that_local_layers_see(kind, tokens):
    cfg = SimpleNamespace(local_attention=kind, list_windows=lambda seq_len: [4, seq_len])
    assert attended_tokens(cfg, 6, [0]) == pytest.approx(np.mean(tokens))
    assert attended_tokens(cfg, 6, [0, 1]) == pytest.approx(np.mean(tokens) + 3.5)


@pytest.mark.parametrize("words", [SEES, SEES_ANY_SIZE, SEES_TILES], ids=["squares", "any size", "tiles"])
def test_flops_of_the_tower_for_an_image(words):
    """Of an image of the largest size; biases, which the derived FLOPs leave out, are sums over nothing."""
    words = [*words, "training.images_per_row=1", "training.seq_len=48", "model.mesh_shape=[[1],[fsdp]]"]
    words += ["distributed.allow_idle_devices=true", "task=sft", "data=jsonl", "data.paths=[x]"]
    spec = program(*words).built
    batch = {name: leaf for name, leaf in spec.abstract_batch.items() if leaf.dtype != np.float32}

    def see(params, batch):
        model, rows = spec.arch.module(params), {name: leaf[0] for name, leaf in batch.items()}
        x = model.embed(model.vocab_weights(), rows["tokens"], rows["positions"])
        inputs = model.add_images(x, rows["positions"], Images(*(rows[name] for name in IMAGE_FIELDS)))
        return inputs.x, inputs.features

    with jax.set_mesh(spec.mesh):
        traced = jax.jit(see).trace(spec.abstract["params"], batch)
    derived = sum(forward_tower_flops(spec.cfg.model, spec.cfg.model.vision)) * spec.batch.num_rows
    assert sum(products(traced.jaxpr.jaxpr, with_biases=False)) == pytest.approx(derived, rel=1e-6)

    # No gradient goes into the tower, which the updates leave out; it goes through a projector with a norm in it.
    updates = "model.lora.rank=2", "model.lora.targets='^attention|^mlp'", "model.lora.train_also=projector"
    spec = program(*words, *updates).built

    def measure(trained, params, batch):
        return sum(jnp.sum(x) for x in jax.tree.leaves(see(spec.arch.merge(trained, params), batch)))

    with jax.set_mesh(spec.mesh):
        differentiate = jax.jit(lambda params, batch: jax.grad(measure)(spec.arch.trained(params), params, batch))
        traced = differentiate.trace(spec.abstract["params"], batch)
    derived = tower_flops(spec.cfg.model, spec.arch.trained_shares_of_vision) * spec.batch.num_rows
    assert sum(products(traced.jaxpr.jaxpr, with_biases=False)) == pytest.approx(derived, rel=0.01)
