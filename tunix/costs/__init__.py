"""Costs of a training step: memory, communication and time; derived, compiled and traced.

Three ways to the same numbers, and tests that compare them:

    derived    `step`, `memory`, `communication`   from the config alone, in milliseconds
    compiled   `hlo`, `compiled_time`              from the compiled program: its collectives, and its predicted time
    traced     `trace_analysis`                    from a trace of real steps

Read `step` first: it counts FLOPs, and takes memory and collectives from the two others. `rollout` has the memory and
the time of a rollout, `passes` what a step does beside its products, `devices` the speeds of kinds of devices, of their
links and of clusters.
"""
