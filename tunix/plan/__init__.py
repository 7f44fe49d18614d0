"""Memory, communication and time of a training step on each mesh of a cluster, predicted without its devices.

Read `ranking.rank` first: it lists the meshes, derives the costs of each (`tunix.costs.derived`), compiles the best
ones for the cluster's kind of device (`compiled`), and sorts them. A `Candidate` is a mesh with its costs; `open_keys`
has the values that a config leaves to `auto`. `text` and `picture` show the result of the command
`python -m tunix.plan`; `choice` takes the best mesh for a run that leaves its mesh or micro batch to `auto`.
"""
