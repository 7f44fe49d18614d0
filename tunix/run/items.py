"""Items of a checkpoint: `state` (arrays), `run` (position and config) and `tokenizer`, each read by itself.

A checkpoint is a folder STEP with the items as folders in it. Where the checkpoint is in a bucket, the folder of this
machine is a stand-in that holds only the address (`find_address`), and the items are read from there.
"""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from tunix.run.object_arrays import list_parts, read_arrays
from tunix.run.objects import find_address, read_item

# Which processes wait for one another when Orbax reads or writes. Every process has to take part in the first; with the
# second, process 0 works alone, and the prefix keeps its barriers apart from those of all processes.
ALL_PROCESSES = ocp.options.MultiprocessingOptions()
ONLY_PROCESS_0 = ocp.options.MultiprocessingOptions(active_processes={0}, barrier_sync_key_prefix="process_0")


def read_state(checkpoint: Path, abstract: Any, processes: Any = ALL_PROCESSES) -> Any:
    """Read the arrays of a checkpoint that `abstract` names, with its dtypes and shardings; others are left out."""
    if address := find_address(checkpoint):
        return read_arrays(address, abstract)
    arguments = ocp.args.PyTreeRestore(
        abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract), partial_restore=True
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=processes)
    with ocp.Checkpointer(handler, multiprocessing_options=processes) as reader:
        return reader.restore(checkpoint / "state", args=arguments)


def read_json(checkpoint: Path, item: str, processes: Any = ALL_PROCESSES) -> dict[str, Any]:
    """Read the item `run` or `tokenizer` of a checkpoint."""
    if address := find_address(checkpoint):
        return read_item(address, item)
    handler = ocp.JsonCheckpointHandler(multiprocessing_options=processes)
    with ocp.Checkpointer(handler, multiprocessing_options=processes) as reader:
        return reader.restore(checkpoint / item, args=ocp.args.JsonRestore())


def find_parts(checkpoint: Path) -> dict[str, Any]:
    """Find the parts of the state that not every checkpoint has. No array is read.

    Returns:
        `copies`: names of the copies of the parameters (`training.copies`); `spike_window`: steps in the window of
        spikes (`training.spikes`), 0 without one.
    """
    if address := find_address(checkpoint):
        return list_parts(address)
    state = ocp.PyTreeCheckpointHandler().metadata(checkpoint / "state").tree
    window = state["spikes"]["loss"].shape[0] if "spikes" in state else 0
    return {"copies": sorted(state.get("copies", {})), "spike_window": window}
