"""What Slurm's tests start in place of a training: does the word of its task in PLAN for this start of the job.

PLAN is like `75,75 0,76`: starts divided by spaces, tasks by commas; a number is an exit code, a name an end.
"""

import os
import signal
import sys
import time
from pathlib import Path

rank, start = int(os.environ["SLURM_PROCID"]), int(os.environ.get("SLURM_RESTART_COUNT", "0"))
word = os.environ["PLAN"].split()[start].split(",")[rank]


def stop(number: int, _frame: object) -> None:
    print(f"task {rank} saves on {signal.Signals(number).name}", flush=True)
    sys.exit(75)


for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, stop)
with Path("starts.txt").open("a") as file:
    file.write(f"{start} {rank} {os.environ['JAX_COORDINATOR_ADDRESS']} {sys.argv[1]}\n")
print(f"start {start} of task {rank}: {word}", flush=True)
while f"\n{Path('starts.txt').read_text()}".count(f"\n{start} ") < int(os.environ["SLURM_NTASKS"]):
    time.sleep(0.05)  # the first to end takes the others along
if word == "wait":
    Path(f"waiting.{start}.{rank}").write_text(str(os.getpid()))
    time.sleep(60)
elif word == "abort":
    os.abort()
else:
    sys.exit(int(word))
