"""Parts of a run in the order in which `tunix.trainer.run` uses them.

`setup` derives everything that can be known before a file is written, `progress` finds the state to start from, `steps`
is the loop over the steps, and `evaluations` measures the model between two steps.
"""
