"""Training: one optimizer step, and all that it is made of.

Read `step` first: a schedule over the microbatches, one division, clipping, the update. `losses` says what is
minimised, `optim` makes the optimizer, `state` has weights and moments, `mesh_choices` settles what a config leaves to
the mesh, and `program` puts model, mesh and optimizer together. `sizes` derives the numbers of a run, and `held_out`
evaluates.

Where stages split the layers, read `turns` first: it says which stage works on which part. `ticks` does the work of all
stages at a time, on the model of `staged`, and `pipelined` makes the gradients of a step of it.
"""
