"""Start the processes of a run: on this node (`python -m tunix.launch`), as a Slurm job, or on Kubernetes.

`__main__`, `nodes` (which node is this), `rendezvous` (nodes meet) and `children` (the processes of a node) are the
launcher; `accelerate` reads that library's config file. `slurm` and `kubernetes` write a script or a manifest into the
run's folder, with what they share in `submission`. Read `nodes` first.
"""
