"""A page of the answers that a run has learnt from: `python -m tunix.samples RUN`. Imports no jax.

samples.jsonl -> `index` (a row for each group of answers) -> `page` (the groups that are chosen) -> page.html
"""
