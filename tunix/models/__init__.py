"""Models: a decoder made of blocks, as Flax modules. A file here names dimensions by letters, and no mesh axis.

Read `transformer` first: embed, a scan over blocks, final norm, logits. Then `block`, and `layer_stacks`, which runs
equal blocks as one piece of program. Then what a block is made of:

    weights and their products      layers, matmul, quantized, lora; block_scaled, table_gradient (GPUs), cpu_library
    attention                       attention (grouped-query), mla, linear_attention; attention_mask, rope
      its kernels                   flash_attention, paged_attention; kernels has their blocks, and chooses
      keys on other devices         context_parallel, ring
    experts                         experts, expert_parallel, grouped_matmul, fused_experts
    ways through the layers         layer_stacks, layer_scan, remat, prefetch, pipeline
    before and behind the layers    vision; scores, mtp

`table` has what is chosen by name: kernels, exchanges, dtypes of products. `flops` counts the arithmetic of a model.
"""
