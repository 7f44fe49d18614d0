"""Training: one optimizer step, and all that it is made of.

Read `step` first: a schedule over the microbatches, one division, clipping, the update. `loss` says what is minimised,
of the `logprobs` of targets, and evaluates held-out sets; `grpo`, `dpo`, `kto` and `embeddings` have the losses of
those tasks, `scores` those of rewards and classes. A `teacher` is a model to learn from. `multiple_choice` asks
questions while a run trains. `optimizer` makes the optimizer, `ema` the averages of weights, `qk_clip` holds scores of
attention down, `state` has weights and moments, `choices` makes the choices that a config leaves to the mesh, and
`train_spec` puts model, mesh and optimizer together. `kernel_check` compares kernels.

Where stages split the layers (pp), `pipeline_schedule` says which stage works on which microbatch, and `pipeline_step`
does the work of all stages and makes the gradients, with that of `pipeline_first_layers`, which come before the stages.
"""
