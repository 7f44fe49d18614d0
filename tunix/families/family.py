"""Form of one family of models at Hugging Face. Imports no jax."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Name:
    """Place of a weight in the files.

    `dims` are its dimensions there, by letter (sharding/dims.py): a matrix "NH,D" has num_heads * head_dim rows. One
    tensor may hold several weights, one after the other along its dimension `fused_dim`. Then `fused` has their sizes
    along it, and the weight is number `part` of them:

        qkv_proj [NH + KH + KH, D], fused = ("NH", "KH", "KH"), fused_dim = 0:   | q | k | v |  are its rows

    Weights may be `interleaved` along a dimension, given by its letter: the tensor has the rows of the first entry of
    each weight, then those of its second entry, and so on:

        gate_up_proj, interleaved = "G"      | gate 0 | up 0 | gate 1 | up 1 | ...
        in_proj_qkvz, interleaved = "I"      | q 0 | k 0 | v 0 v 1 | z 0 z 1 | q 1 | k 1 | v 2 v 3 | ...   J = 2 I
    """

    tensor: str  # {} is the number of the layer, a second {} that of the expert
    dims: str
    part: int = 0
    fused: tuple[str, ...] = ()
    fused_dim: int = 0
    interleaved: str = ""

    @property
    def numbered(self) -> str:
        """Dimensions of the weight that are numbers in the tensor's name, by letter: there is a tensor for each."""
        return "LX"[: self.tensor.count("{}")]


@dataclass(frozen=True)
class Family:
    """Form of one family at Hugging Face: names of tensors, keys of config.json."""

    model_type: str
    architecture: str  # class in transformers
    names: dict[str, Name]  # parameter -> tensor
    keys: dict[str, str]  # our key -> key of config.json
    fixed: dict[str, tuple]  # key of config.json -> values that our layers can compute, the usual one first
    absent: dict[str, Any] = field(default_factory=dict)  # key of config.json -> its value where the file leaves it out
    renamed: tuple[
        tuple[str, str], ...
    ] = ()  # (beginning of a tensor name in other classes and versions, the usual beginning)
    synonyms: dict[str, str] = field(default_factory=dict)  # key of config.json in other versions -> the usual key
    also: tuple[str, ...] = ()  # other values of model_type that mean the same
    biases: dict[str, str] = field(default_factory=dict)  # flag of config.json -> `model.biases` where it is true
    local_rope: bool = False  # local layers have rotations of their own, which no scaling changes
    unrotated_global: bool = False  # where there are local layers, the global ones have no positions
    # Keys of config.json with these values tell this family from others of its model_type.
    signature: dict[str, Any] = field(default_factory=dict)
    query_scale: float | None = None  # `model.query_scale` where no key of config.json says it; None for head_dim
    local_type: str = "sliding_attention"  # word for a local layer in layer_types of config.json
    qk_norm: str = "per_head"  # `model.qk_norm` where use_qk_norm of config.json is true
    # Patterns of the names of tensors that are not weights of the decoder; {num_layers} is the number of its layers.
    ignored: tuple[str, ...] = ()
    constants: dict[str, float] = field(default_factory=dict)  # tensor -> the number that our layers have in its place
    published_code: bool = False  # auto_map names code that computes what transformers' own class computes
    values: Path | None = None  # YAML file of the family's parts; None for conf/model/family/NAME.yaml

    def name(self, path: str) -> Name | None:
        """Return the place of a parameter in the files, or None if it has none.

        A model may have several stacks of layers. A part that differs in one kind of stack has a name of its own, any
        other part has that of `blocks`:

            linear_blocks_1.mlp.up.w    looked up as linear_blocks.mlp.up.w, then as blocks.mlp.up.w
        """
        stack, _, part = path.partition(".")
        if not stack.startswith(("dense_blocks", "linear_blocks", "local_blocks", "shared_")):
            return self.names.get(path)
        kind = stack.rstrip("_0123456789")
        return self.names.get(f"{kind}.{part}") or self.names.get(f"blocks.{part}")

    def usual_name(self, tensor: str) -> str:
        """Return the name in `names` of a tensor whose class or version begins its names otherwise."""
        for old, new in self.renamed:
            if tensor.startswith(old):
                return new + tensor.removeprefix(old)
        return tensor

    @property
    def tables(self) -> set[str]:
        """Names of the tensors that have a row for each token."""
        return {name.tensor for name in self.names.values() if name.dims.startswith("V,")}
