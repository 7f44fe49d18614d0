"""A run from outside its loop: folder, metrics and their sinks, start report, compiling, traces.

Read `folder` first: the files of a run, its lock, logs and environment. `metrics` has the numbers of each step, and
`sinks` and `remote_sinks` are where they go (`table` lists them). `start_report` prints the derived numbers before
step 1, `compiling` compiles programs beside other work and keeps them on disk, `early_stopping` lists the reasons to
end a run before its last step, `trace` profiles some steps. `goodput` counts where the time of a run went. `history`
reads what a run has written, and `model_card` makes a page of it for the hub.
"""
