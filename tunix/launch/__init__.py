"""Start the processes of a run: on this node (`python -m tunix.launch`), as a Slurm job, on Kubernetes, or on Ray.

`__main__`, `nodes` (which node is this), `rendezvous` (nodes meet) and `children` (the processes of a node) are the
launcher; `watch` has signals and ends, `accelerate` reads that library's config file. `slurm` and `kubernetes` write a
script or a manifest into the run's folder, with what they share in `submission`. `ray` starts a run on a cluster
(`ray_cluster`) by an actor on each node (`ray_node`). Read `nodes` first.
"""
