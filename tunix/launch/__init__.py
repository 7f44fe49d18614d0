"""Starting the processes of a run: on this node (`python -m tunix.launch`), by Slurm, on Kubernetes."""
