"""A run from outside its loop: folder, lock, checkpoints, metrics, start report, traces.

Read `run_folder` first: the files of a run. `lock` lets one run at a time write there, `checkpoint` saves and restores
the state, `metrics` writes the numbers of each step, `start_report` prints the derived numbers before step 1,
`environment` records versions and the command, `logs` sets up logging, and `trace` profiles some steps.
"""
