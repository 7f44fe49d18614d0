"""Optimizers and schedules: the choices of the groups `optimizer` and `scheduler`, with what they compute.

To add an optimizer, write its class (`rules`) and add it to `OPTIMIZERS` (`table`); to add a schedule, add a shape to
`SHAPES` (`schedules`). Nothing here imports jax until it is called.
"""
