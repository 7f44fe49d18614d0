"""What a step holds, moves and takes on each mesh of a cluster, before anything runs."""
