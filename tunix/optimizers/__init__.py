"""Optimizers (`table`) and schedules (`schedules`): the choices of two groups of the config, with what they compute.

`muon` is the rule of matrices, `moments` keeps moments in fewer bits. `table` and `schedules` import no jax until they
are called.
"""
