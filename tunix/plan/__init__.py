"""Memory, communication and time of a training step on each mesh of a cluster, predicted without its devices.

Read `ranking.rank` first: it lists the meshes, derives the costs of each (`tunix.costs.derived`), compiles the best
ones (`compiled`) for devices that are only described (`described_devices`), each in a process of its own
(`compile_process`), and sorts them. A `Candidate` is a mesh with its costs; `derived_time` has the time of a step that
is not compiled, `assumptions` the speeds that all times go by, and `open_keys` the values that a config leaves to
`auto`. `text` and `picture` show the result of the command `python -m tunix.plan`; `choice` takes the best mesh for a
run that leaves its mesh or micro batch to `auto`.
"""
