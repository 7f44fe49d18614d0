"""A program for the test of launcher=ray, in place of the training: process 0 waits, process 1 ends the run."""

import os
import sys
import time

from tunix.config.compose import compose
from tunix.processes.identity import find_identity

identity = find_identity(compose([]).config.distributed)
names = ("GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "JAX_PLATFORMS", "COLOUR")
print([os.environ[name] for name in names], identity.coordinator_address, *sys.argv[1:])
print(f"process {identity.process_id} has something to say", file=sys.stderr)
if identity.process_id == 1:
    sys.exit(77)
time.sleep(600)
