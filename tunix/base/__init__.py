"""Ground floor, which every other folder may use: errors for users, files, text tables, types of config values.

Read `errors` first: `UserError` is the one exception for wrong input. It becomes one line on stderr and exit code 2.
`disk` is for files, `section` has the types of which the config is made, `dotted` imports what a user names by a dotted
path. Nothing here imports jax.
"""
