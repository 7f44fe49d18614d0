"""Models: a decoder made of blocks, as Flax modules. A file here names dimensions by letters, and no mesh axis.

Read `transformer` first: embed, a scan over blocks, final norm, logits. Then `block`, and `stacks`, which runs equal
blocks as one piece of program. `layers` has the products, norms and the MLP, `attention` and `positions` what attention
needs, `lora` and `quantized` other forms of a weight. `flops` counts the arithmetic of a model, `paths` names its
parameters.
"""
