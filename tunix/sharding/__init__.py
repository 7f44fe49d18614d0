"""Sharding: which device holds which part of each array.

Read `dims` first: its tables list the dimensions of all arrays (a letter each) and the mesh axes with their roles.
`mesh_shape` turns `model.mesh_shape` into sizes of axes and checks them, `mesh` makes the JAX mesh, `layout` says how
weights and activations are split at rest and during a product, and `arrays` moves rows and arrays between processes.
"""
