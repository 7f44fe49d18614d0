"""Start the processes of a run on a Ray cluster (https://docs.ray.io), follow them, and start them again elsewhere.

    this process (the driver)                 each node of the run
    ─────────────────────────                 ────────────────────
    a placement group: a bundle per node  ──> actor `RayNode` in its bundle
    address of process 0, run's folder    ──>   python -m tunix.launch --node_rank=...  ──>  processes
    signals                               ──>                                           ──>
    output, exit code                     <──                                           <──

So a process finds its rank and the address of process 0 as it does without Ray. When a node is lost, the others are
ended, and all start again with `resume`: on as many nodes as before, or on fewer where `launcher.min_nodes` allows it.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from tunix.base.errors import Ending, UserError
from tunix.base.files import expand_home
from tunix.config import Config, Ray, compose
from tunix.launch import children, submission
from tunix.processes import exits

if TYPE_CHECKING:
    from tunix.launch import ray_cluster


def launch(job: compose.Job) -> int:
    """Run on the cluster until the end; return the exit code of the run.

    Raises:
        UserError: Ray is not installed, there is no cluster, or it lacks the nodes. No file is left then.
    """
    launcher = job.config.launcher
    assert isinstance(launcher, Ray)
    sizes = list_sizes(job.config, launcher)
    if job.config.dry_run:
        command = make_command(launcher, 0, sizes[0], ("ADDRESS", 0), job.run_dir.absolute(), job.resume_step)
        bundle, environment = make_bundle(launcher), make_environment(launcher)
        shown = {"nodes": sizes, "bundle": bundle, "environment": environment, "python": command}
        print(f"# {submission.describe(job.config, launcher)}. A bundle and a command for each node, node 0's here.")
        print(yaml.safe_dump(shown, sort_keys=False, width=1000), end="")
        submission.print_numbers(job.config, launcher)
        return 0
    if find_spec("ray") is None:
        raise UserError("launcher=ray needs the package ray: pip install 'tunix-trainer[ray]'")
    from tunix.launch import ray_cluster

    with ray_cluster.connect(launcher.address), children.receive_signals() as received:

        def take_nodes() -> list[ray_cluster.Node]:
            return ray_cluster.take_nodes(make_bundle(launcher), sizes, launcher.start_timeout_s, received)

        with submission.prepare_folder(job) as folder:
            nodes = take_nodes()
        print(f"run folder: {folder}", flush=True)
        start_at, newer = job.resume_step, submission.find_newer(job.config, folder, job.resume_step)
        for restart in range(launcher.max_restarts + 1):
            code, is_requested = _run_once(launcher, nodes, folder, start_at, received)
            training = job.config.training
            # An end that the run's own keys ask for; starting again at once would undo it.
            stops_by_itself = code == exits.STOPPED and bool(training.time_limit_s or training.hard_stop)
            if is_requested or code not in submission.TO_RETRY or stops_by_itself:
                break
            if restart == launcher.max_restarts:
                children.say(f"exit code {code}; launcher.max_restarts={restart} are used up")
                break
            children.say(f"exit code {code}: starts again, {restart} of {launcher.max_restarts} times so far")
            if newer is None or submission.find_newer(job.config, folder, start_at) != newer:
                start_at = None  # a start has gone on from the step that the user named: from now on the newest
            try:
                nodes = take_nodes()
            except Ending as ending:  # no nodes, or a signal: the run ends with the exit code that it has
                children.say(str(ending))
                break
        return code


def _run_once(
    launcher: Ray, nodes: "list[ray_cluster.Node]", folder: Path, step: int | None, received: list[int]
) -> tuple[int, bool]:
    """Start the run on these nodes, wait for its end and give the nodes back.

    Returns the exit code, and whether a signal to this process has asked the run to stop.
    """
    from tunix.launch import ray_cluster

    children.say(f"{len(nodes)} nodes, {launcher.tasks} processes each; process 0 is on {nodes[0].host}")
    config = folder / "config.yaml"
    try:
        for node in nodes:
            command = make_command(launcher, node.rank, len(nodes), nodes[0].address, folder, step)
            node.start(command, make_environment(launcher), str(Path.cwd()), config, config.read_text())
        is_requested = children.wait_for_all(nodes, received, launcher.grace_period_s)
    finally:  # end what still runs on the nodes, and let others use them
        ray_cluster.remove_placement_group(nodes[0].group)
    worst = children.find_worst(nodes)
    assert worst.code is not None
    return worst.code, is_requested


def list_sizes(config: Config, launcher: Ray) -> list[int]:
    """Return the numbers of nodes on which the run can train: `launcher.nodes`, then fewer, down to `min_nodes`.

    Raises:
        UserError: the mesh or the batch does not fit on `min_nodes`, or the batch is not fixed.
    """
    least = launcher.min_nodes or launcher.nodes
    if least < launcher.nodes and not (config.training.global_batch_size or config.training.global_batch_tokens):
        raise UserError(
            f"launcher.min_nodes={least} needs training.global_batch_size or training.global_batch_tokens: without "
            "them the batch of a step would shrink with the number of nodes"
        )
    sizes = [launcher.nodes]
    values = config.model_dump(mode="json", by_alias=True)
    for number in range(launcher.nodes - 1, least - 1, -1):
        values["launcher"] |= {"nodes": number, "min_nodes": None}
        try:
            compose.build(values)  # the checks of the config know which meshes and batches this many devices can have
        except UserError as error:
            # A number in between that does not fit is left out: 4 and 2 nodes may fit, and 3 not.
            if number == least:
                raise UserError(f"launcher.min_nodes={least}: the run does not fit: {error}") from None
        else:
            sizes.append(number)
    return sizes


def make_bundle(launcher: Ray) -> dict[str, float]:
    """Return what the run takes of each node, by Ray's names."""
    amounts = (text.rpartition("=") for text in launcher.resources)
    bundle = {"CPU": launcher.cpus_per_task * launcher.tasks, "GPU": float(launcher.gpus_per_node)}
    bundle |= {name: float(amount) for name, _, amount in amounts}
    return {name: amount for name, amount in bundle.items() if amount}


def make_command(
    launcher: Ray, rank: int, num_nodes: int, address: tuple[str, int], folder: Path, step: int | None
) -> list[str]:
    """Return the command of one node, for Python: the launcher of a node, and what each process runs.

    Args:
        address: host and port of node 0; process 0 listens on the port after it.
        step: of the checkpoint to begin with; None takes the newest.
    """
    resume = f"resume={compose.quote_path(folder if step is None else folder / 'checkpoints' / str(step))}"
    nodes = [f"--nnodes={num_nodes}", f"--node_rank={rank}", f"--nprocs={launcher.tasks}"]
    meeting = [f"--master_addr={address[0]}", f"--master_port={address[1]}"]
    local = [f"--grace_s={launcher.grace_period_s:g}", f"--log_dir={folder}", "--label"]
    script = [str(expand_home(launcher.train_script))] if launcher.train_script else ["-m", "tunix"]
    return ["-m", "tunix.launch", *nodes, *meeting, *local, *script, resume]


def make_environment(launcher: Ray) -> dict[str, str]:
    """Return the environment variables of the run, beside those that Ray's workers have."""
    pairs = (text.partition("=") for text in launcher.extra_env)
    # Ray does not hide the GPUs of a node from a run that asks for none: without this, jax would take all of them.
    cpu = {} if launcher.gpus_per_node else {"JAX_PLATFORMS": "cpu"}
    return cpu | {name: value for name, _, value in pairs}
