"""Is this machine, this allocation, this cluster fit to train: `python -m tunix.doctor`."""
