"""Models: a decoder made of blocks, as Flax modules. A file here names dimensions by letters, and no mesh axis.

Read `transformer` first: embed, a scan over blocks, final norm, logits. Then `block`, and `stacks`, which runs equal
blocks as one piece of program. Then what a block is made of:

    weights and their products      layers, embedding, norms, products, quantized, lora, fp8
    attention                       grouped_query, latent, linear_attention; attention, seen, positions
      its kernels                   flash, grouped (for experts); kernels chooses
      keys on other devices         exchanges, ring
    experts                         router, experts, expert_exchanges, expert_rows
    ways through the layers         forward, stacks, remat, prefetch, pipeline

`flops` counts the arithmetic of a model, `paths` names its parameters.
"""
