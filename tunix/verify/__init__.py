"""The command `tunix verify`: the same numbers on every mesh, and files that are what was written."""
