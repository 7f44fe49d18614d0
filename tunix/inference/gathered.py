"""Weights gathered once for many tokens: each layer on its own, in the dtype of products."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import reshard

from tunix.models.layers import Einsum, Embedding
from tunix.models.lora import LowRank
from tunix.models.matmul import MATMUL, product_of_few_rows
from tunix.models.quantized import dequantize
from tunix.models.transformer import Transformer
from tunix.sharding.arrays import bring_to
from tunix.sharding.layout import Layout
from tunix.training.state import Architecture, Weight

Tree = dict[str, Any]


class Gathered(NamedTuple):
    """Parameters as products take them.

    Training gathers a layer when it needs it. Decoding needs every layer for every token, so that gathering them once
    costs memory, bytes of the model over the axes that split it in use, and saves nearly all traffic. Layers are arrays
    of their own: a slice of a stacked array inside of a loop would be a copy for each token.
    """

    remaining: Tree  # embedding, final norm, head
    layers: dict[str, list[Tree]]  # by the name of a stack, a tree for each of its layers
    mtp_layers: dict[str, list[Tree]]  # the same of the layer of `model.mtp`; empty without

    def module(self, arch: Architecture) -> Transformer:
        """Return the model, whose stacks hold one layer: `hidden_apart` takes the others as its `params`."""
        tree = self.remaining | {name: trees[0] for name, trees in self.layers.items()}
        if self.mtp_layers:
            tree["mtp"] = tree["mtp"] | {name: trees[0] for name, trees in self.mtp_layers.items()}
        module = arch.module(tree)
        # The others keep what they have: a tower its products, which have many patches, and the norms of its updates.
        stacks = [getattr(module, name) for name in self.layers]
        stacks += [getattr(module.mtp, name) for name in self.mtp_layers]
        parts: list[Einsum | Embedding] = [module.embedding]
        parts += [part for stack in stacks for part in _list_einsums(stack)]
        for part in parts:
            part.product = product_of_few_rows()
        for _, update in [each for stack in stacks for each in nnx.iter_modules(stack)]:
            if isinstance(update, LowRank) and update.magnitude is not None:
                update.is_divided = True  # `_order_weights` has divided the magnitudes by their norms
        return module


def gather(arch: Architecture, params: Tree, as_matrices: bool) -> Gathered:
    """Return the parameters gathered; with `as_matrices` quantized weights are matrices again.

    Every device gets all layers, also of parameters that rest on stages.
    """
    model = arch.module(params)

    def gather_one(parameter: jax.Array, weight: Weight) -> jax.Array:
        spec = model.layout.stored(weight.equation)
        # Generation has another layout than training where stages split the layers: all layers come to each device.
        return model.layout.gather(bring_to(parameter, spec), weight.equation)

    with jax.named_scope("gather"):
        gathered = jax.tree.map(gather_one, params, arch.weights)
        if as_matrices and model.cfg.lora.quantize_base:
            gathered = _make_matrices(gathered, arch.weights, model.cfg.lora.quantize_base, model.layout)
        remaining, layers = _split_stacks(model, gathered)
        if model.mtp is None:
            return Gathered(remaining, layers, {})
        mtp, mtp_layers = _split_stacks(model.mtp, remaining["mtp"])
    return Gathered(remaining | {"mtp": mtp}, layers, mtp_layers)


def _split_stacks(model: Any, tree: Tree) -> tuple[Tree, dict[str, list[Tree]]]:
    """Return the parameters of a model without those of its stacks, and those of each of its layers."""
    blocks = {stack.name: nnx.graphdef(getattr(model, stack.name)) for stack in model.stacks}
    layers = {name: [_order_weights(block, one) for one in _split_layers(tree[name])] for name, block in blocks.items()}
    return {name: part for name, part in tree.items() if name not in blocks}, layers


def _order_weights(block: nnx.GraphDef, tree: Tree) -> Tree:
    """Return the parameters of a layer; weights have their dimensions in the order that `product_of_few_rows` takes."""
    # Transposed once here, and not at each of the many tokens.
    module = nnx.merge(block, tree)
    for _, part in nnx.iter_modules(module):
        if isinstance(part, Einsum) and part.lora is not None and part.lora.magnitude is not None:
            magnitude = part.lora.magnitude[...]
            norms = reshard(part.lora.norms(part.gathered()), jax.typeof(magnitude).sharding.spec)
            part.lora.magnitude.set_value(magnitude / norms)
    for part in _list_einsums(module):
        dims = MATMUL[product_of_few_rows()].order(part.equation)
        part.w.set_value(jnp.transpose(part.w[...], [part.equation.w.index(dim_name) for dim_name in dims.w]))
    return nnx.to_pure_dict(nnx.state(module))


def _list_einsums(module: nnx.Module) -> list[Einsum]:
    """Return the products of a module; those with quantized weights are left out, because codes keep their order."""
    parts = [part for _, part in nnx.iter_modules(module) if isinstance(part, Einsum)]
    return [part for part in parts if jnp.issubdtype(part.w.dtype, jnp.floating)]


def _split_layers(stack: Tree) -> list[Tree]:
    """Return the layers of a stack, whose arrays have a first dimension L, as L trees."""
    count = len(jax.tree.leaves(stack)[0])
    return [jax.tree.map(lambda stacked, layer=layer: stacked[layer], stack) for layer in range(count)]


def _make_matrices(params: Any, weights: Any, qtype: str, layout: Layout) -> Any:
    """Return the tree with matrices, of the dtype of products, in the place of codes; scales stay and are not read."""
    if not isinstance(params, dict):
        return params
    tree = {name: _make_matrices(leaf, weights[name], qtype, layout) for name, leaf in params.items()}
    if "w_scale" in tree:
        equation = weights["w"].equation  # of the codes
        spec = layout.in_use(equation)
        tree["w"] = dequantize(tree["w"], tree["w_scale"], equation.dequantized(), qtype, layout.compute, spec)
    return tree
