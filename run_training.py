"""Train: `python run_training.py [group=option] [key=value]`; the same as `python -m tunix`."""

import sys

from tunix.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
