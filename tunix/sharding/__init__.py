"""Sharding: which device holds which part of each array.

Read `dims` first: its tables list the dimensions of all arrays (a letter each) and the mesh axes with their roles.
`equations` are products written in these letters. `mesh_shape` turns `model.mesh_shape` into sizes of axes and checks
them, and `mesh` makes the JAX mesh. `placement` says how weights and activations are split at rest and during a
product, `layout` brings them from one place to the other, and `arrays` moves rows and arrays between processes.
"""
