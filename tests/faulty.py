"""run_training.py, but reading the data fails where FAULT="RANK raise|hang SAMPLE" says."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from run_training import main
from tunix import supervisor

rank, fault, sample = os.environ["FAULT"].split()
if supervisor.is_child() and f"distributed.process_id={rank}" in sys.argv:
    from tunix.data.batches import TrainBatches

    read = TrainBatches.read

    def faulty(self, first_sample):
        if first_sample >= int(sample):
            if fault == "hang":
                time.sleep(10_000)
            raise RuntimeError("the disk caught fire")
        return read(self, first_sample)

    TrainBatches.read = faulty

if __name__ == "__main__":
    sys.exit(main())
