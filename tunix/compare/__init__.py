"""Several runs side by side: their configs, numbers and losses, from the files of their folders. Imports no jax."""
