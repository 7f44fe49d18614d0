"""Checks of the layers of a model against the stages of a mesh (its axis pp)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tunix.base.errors import UserError
from tunix.config.mlp import ExpertsMlp
from tunix.sharding.dims import DIMS, LAYERS
from tunix.sharding.mesh_shape import nearest, num_stages

if TYPE_CHECKING:
    from tunix.config.model import Model


def check_stages(model: "Model", sizes: Mapping[str, int]) -> None:
    """Raise `UserError` where the stages of a mesh of these sizes cannot share the layers of a model.

    All stages run one program, each with its own weights. So each stage must have layers of the same kinds in the same
    order, and only the residual stream goes from stage to stage. `check_divides` refuses the same meshes, by the number
    `Model.num_turns`; the errors here say the reason, so they must come first.
    """
    stages = num_stages(sizes)
    if stages == 1:
        return
    first, *others = model.runs
    leave_out = f"leave {', '.join(DIMS[LAYERS].weight_axes)} out of model.mesh_shape"
    for key in ("shared_kv", "layer_inputs"):
        if getattr(model, key) is not None:
            raise UserError(f"model.{key} gives a layer arrays that do not travel from stage to stage; {leave_out}")
    if others and isinstance(model.mlp, ExpertsMlp) and model.mlp.dense_layers:
        raise UserError(
            f"model.mlp.dense_layers={model.mlp.dense_layers}: the first stage would have layers without experts, and "
            f"the others none; {leave_out}, or set model.mlp.dense_layers=0"
        )
    turns = model.num_turns
    if turns % stages and (others or len(first.pattern) > 1):
        legal = [number for number in range(2, turns + 1) if turns % number == 0]
        near = f"take {' or '.join(map(str, nearest(legal, stages)))} stages, " if legal else ""
        raise UserError(
            f"model.num_layers={model.num_layers}: layers of several kinds take turns, and {stages} stages do not have "
            f"the same whole turns; {near}{leave_out}, or change model.num_layers"
        )
