"""Sharding: which device holds which part of each array.

Read `table` first: the dimensions of all arrays (a letter each) and the mesh axes with their roles. `equations` are
products written in these letters. `mesh_shape` turns `model.mesh_shape` into sizes of axes and checks them, and
`mesh` makes the JAX mesh. `layout` says how weights and activations are split at rest and during a product, and
brings them from one to the other. `arrays` moves rows and arrays between processes and devices.
"""
