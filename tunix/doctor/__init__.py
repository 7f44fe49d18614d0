"""Check whether this machine, allocation or cluster is fit to train: `python -m tunix.doctor`.

`software` checks versions and environment variables before jax starts, `machine` the devices and limits of one process,
`together` what processes see of each other and how fast their links are. Each check yields `findings.Finding`s, and
`__main__` collects and shows them: read `examine` there first.
"""
