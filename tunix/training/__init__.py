"""Training: one optimizer step, and all that it is made of.

Read `step` first: a schedule over the microbatches, one division, clipping, the update. `losses` says what is
minimised, `optim` makes the optimizer, `state` holds weights and moments, `program` puts model, mesh and optimizer
together, `start` makes the state of step 0, `sizes` derives the numbers of a run, and `held_out` evaluates.
"""
