"""Ground floor, which every other folder may use. Nothing here imports jax.

Read `errors` first: `UserError` is the one exception for wrong input. It becomes one line on stderr, without secrets,
and exit code 2. `files` reads and writes files, `buckets` those behind addresses, `digests` tells later whether files
are what was written. `config_types` has the types of which the config is made, `dotted_path` imports what a user names
by a dotted path, `text` formats tables, `figures` draws, `web` asks servers, `progress` says that work takes long.
`forms` has the versions of what is written and read again.
"""
