"""What the fork server imports: the parts of a training that take long to import. Starts no backend."""

import gc

import support.forks  # noqa: F401

import tunix.__main__
import tunix.train_command
import tunix.trainer  # noqa: F401

gc.collect()
gc.freeze()  # a fork does not write to the pages of these objects by looking at them
