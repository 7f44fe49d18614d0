"""Train: `python run_training.py [group=option] [key=value]`; the same as `python -m tunix`."""

from tunix.__main__ import main
from tunix.processes.exits import leave

if __name__ == "__main__":
    leave(main())
