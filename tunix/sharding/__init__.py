"""Sharding: which device holds which part of each array.

Read `table` first: the dimensions of all arrays (a letter each), the mesh axes with their roles, and equations, which
are products written in these letters. `mesh` turns `model.mesh_shape` into sizes of axes, checks them, and makes the
JAX mesh. `layout` says how weights and activations are split at rest and during a product, and brings them from one to
the other. `arrays` moves rows and arrays between processes and devices.
"""
