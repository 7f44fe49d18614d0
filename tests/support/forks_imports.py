"""What the fork server imports, finds out about the installed packages and reads of conf/: each program would do it again.

Starts no backend of JAX.
"""

import gc
import signal

import support.forks  # noqa: F401
from support import composing
from tensorboard.plugins.text import metadata  # noqa: F401
from tensorboard.summary.writer import record_writer  # noqa: F401
from tensorboard.util import tensor_util  # noqa: F401

import tunix.__main__
import tunix.train_command
import tunix.trainer  # noqa: F401
from tunix.base import progress
from tunix.config.compose import compose
from tunix.run.folder import list_packages

progress.QUIET_S = progress.REPEAT_S = (
    1e6  # tests compare what programs print, and on a busy machine everything takes long
)
list_packages()
composing.remember()
compose([])

gc.collect()
gc.freeze()  # a fork does not write to the pages of these objects by looking at them
signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a fork that is not the program yet, which then handles it
