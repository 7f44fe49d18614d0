"""Costs of a training step: memory, communication and time; derived, compiled and traced.

Three ways to the same numbers, and tests that compare them:

    derived    `derived`, `memory`, `communication`   from the config alone, in milliseconds
    compiled   `hlo`, `compiled_time`                 from the compiled program: its collectives, and its predicted time
    traced     `trace_analysis`                       from a trace of real steps

Read `derived` first: it adds up memory and collectives. `rollout` has the memory and the time of a rollout, `devices`
the speeds of kinds of devices and of their links. `figure` draws bars.
"""
