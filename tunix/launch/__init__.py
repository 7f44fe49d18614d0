"""Start the processes of a run: on this node (`python -m tunix.launch`), as a Slurm job, on Kubernetes, or on Ray.

The launcher of a node is `__main__`. `nodes` finds out which node this is and lets nodes meet, `children` starts the
processes of the node, passes signals on and ends all processes together. Read `nodes` first.

`slurm` and `kubernetes` write a script or a manifest into the run's folder; what both need is in `submission`. `ray`
starts a run on a cluster by an actor on each node (`ray_cluster`).
"""
