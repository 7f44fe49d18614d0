"""Processes of one run: who they are, how they meet, agree, notice that one is gone, and end.

    identity -> rollcall -> peers.join -> (training: peers, watchdog) -> exits

Read `identity` first: rank and coordinator, from the config or the environment. `rollcall` checks that all processes
have come and fit together, `peers` starts the JAX runtime and has agreement and barriers, `watchdog` notices a
process that hangs and a signal that asks to stop, `supervisor` is the parent of each process, and `exits` has the
exit codes.
"""
