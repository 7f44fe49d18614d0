"""Checkpoints of a run: saved, kept, checked, restored.

Read `checkpoint` first: what a checkpoint holds, and which one a resumed run goes on from. `store` has the life of a
checkpoint, the same in every place: `folders`, with one disk for all hosts or without, and the `bucket`. `root` writes
the other files that a run needs there.
"""
