"""Command line: from the words that a user types to a checked config, and from errors to messages of one line.

Read `compose` first: Hydra composes conf/ and the words, pydantic checks the result. `mistakes` rewrites error
messages, `keys` lists the legal keys, `runs` finds saved runs, `architecture` reads the config.json of a model, and
`command` is for the commands beside training. Nothing here imports jax.
"""
