"""Costs of a training step: memory, communication and time; derived, compiled and traced.

Three ways to the same numbers, and tests that compare them:

    derived    `derived`, `transfers`            from the config alone, in milliseconds
    compiled   `hlo`, `schedule`                 from the compiled program: its collectives, and its predicted time
    traced     `timeline`, `communication`       from a trace of real steps

Read `derived` first: it adds up `state_memory`, `activation_memory` and the collectives of three files of transfers.
`schedule` walks through a compiled program, whose `instructions` have the work that `instruction_work` counts.
`devices` has the speeds of kinds of devices, `communication_report` and `figure` show the results.
"""
