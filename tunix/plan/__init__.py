"""Memory, communication and time of a training step on each mesh of a cluster, predicted without its devices.

Read `ranking.rank` first: it lists the meshes, derives the costs of each (`tunix.costs.step`), compiles the best
ones for devices that are only described, each in a process of its own (`compile`), and sorts them. `derived_time` has
the time of a step that is not compiled; the devices, and the speeds that all times go by, are in `tunix.costs.devices`.
`report` shows the result of the command `python -m tunix.plan`; `plan_run` in trainer.py takes the best mesh for a run
that leaves its mesh or micro batch to `auto`.
"""
