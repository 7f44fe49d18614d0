"""Who am I: every launcher's environment, and what is wrong with some."""

import re
from dataclasses import replace

import pytest
from jax._src.clusters import ClusterEnv

from tunix.base.errors import UserError
from tunix.config.compose import compose
from tunix.processes.identity import Identity, find_identity
from tunix.train_command import train

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "4097", "SLURM_STEP_NODELIST": "gpu[07-09,12]", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "4(x4)", "SLURM_NODEID": "1",
}  # fmt: skip
MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}  # fmt: skip
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def identity(environment: dict[str, str], *overrides: str) -> Identity | None:
    return find_identity(compose(list(overrides)).config.distributed, environment)


@pytest.fixture(autouse=True)
def no_scontrol(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)


def test_alone():
    assert identity({}) is None
    assert identity({"MASTER_ADDR": "here", "MASTER_PORT": "29500"}) is None  # accelerate with one process
    assert identity({"SLURM_JOB_ID": "3", "SLURM_NTASKS": "8"}) is None  # the batch shell
    for environment in (TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}, SLURM | {"SLURM_STEP_NUM_TASKS": "1"}):
        assert identity(environment) is None


def test_torchrun():
    assert identity(TORCHRUN) == Identity("RANK and WORLD_SIZE", "a:29501", 4, 3, (1,))
    assert identity(TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}).local_device_ids is None  # one per node takes all
    assert identity(TORCHRUN | {"CUDA_VISIBLE_DEVICES": "5"}).local_device_ids is None  # the launcher hid the others
    assert identity(TORCHRUN | {"CUDA_VISIBLE_DEVICES": "4,5"}).local_device_ids == (1,)


def test_torchrun_may_start_again_only_what_resumes(monkeypatch):
    """Another run would begin at step 0, without a word; one of a named step would leave what it has saved since."""
    job, started = compose([]), []
    resumed = replace(job, config=job.config.model_copy(update={"resume": "run"}))
    monkeypatch.setattr("tunix.processes.supervisor.supervise", lambda distributed: started.append(1) or 0)
    for count, again in (("0", job), ("1", resumed)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        assert train(again) == 0
    for refused, begins in ((job, "at step 0 in"), (replace(resumed, resume_step=3), "at step 3 again, without what")):
        with pytest.raises(UserError, match=rf"RESTART_COUNT=1\), and it would begin {begins} .* resume=RUN_DIR"):
            train(refused)
    assert len(started) == 2


def test_slurm():
    assert identity(SLURM) == Identity("Slurm", "gpu07:61441", 16, 5, (1,))
    per_node = SLURM | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_PROCID": "3"}
    assert identity(per_node).local_device_ids is None
    uneven = per_node | {"SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "1(x2),3"}
    assert identity(uneven).local_device_ids is None  # of the second node
    assert identity(uneven | {"SLURM_NODEID": "2"}).local_device_ids == (1,)
    assert identity(SLURM | {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:77"}).coordinator_address == "10.0.0.1:77"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu-a01,gpu-b[01-02]", "gpu-a01"), ("rack[1-2]n[3-4]", "rack1n3"), ("n[1-2,7]-ib,m1", "n1-ib"), ("n07", "n07")],
)
def test_the_first_of_a_list_of_nodes(nodes, first):
    assert identity(SLURM | {"SLURM_STEP_NODELIST": nodes}).coordinator_address == f"{first}:61441"


def test_an_ipv6_address_is_in_brackets():
    for host in ("::1", "[::1]"):
        assert identity(TORCHRUN | {"MASTER_ADDR": host}).coordinator_address == "[::1]:29501"


def test_open_mpi():
    found = identity(MPI)
    assert (found.source, found.num_processes, found.process_id, found.local_device_ids) == ("Open MPI", 2, 1, (1,))
    host, port = found.coordinator_address.split(":")
    assert host == "10.96.0.1"
    assert 61440 <= int(port) < 65536
    for address, host in (("tcp4://10.0.0.1", "10.0.0.1"), ("tcp6://[fe80::1,2620::2]", "[fe80::1]")):
        uri = f"1531576320.0;{address}:43370"
        assert identity(MPI | {"OMPI_MCA_orte_hnp_uri": uri}).coordinator_address == f"{host}:{port}"
    uri = "1531580416.0;tcp://10.96.0.1,10.148.0.1:34911"  # mpirun's number of the next job is larger by 4096
    assert identity(MPI | {"OMPI_MCA_orte_hnp_uri": uri}).coordinator_address != found.coordinator_address


def test_open_mpi_5_names_the_first_node_in_the_job():
    """It gives the processes of each node the address of the daemon there, which listens for them alone."""
    here = MPI | {"OMPI_MCA_orte_hnp_uri": "", "PMIX_SERVER_URI41": "prterun-node-0-4711@0.1;tcp4://127.0.0.1:41671"}
    assert identity(here).coordinator_address.startswith("127.0.0.1:")
    two_nodes = here | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    assert identity(two_nodes).coordinator_address.startswith("node-0:")
    first = two_nodes | {"PMIX_SERVER_URI41": "prterun-node-0-4711@0.0;tcp4://127.0.0.1:35773"}
    assert identity(first).coordinator_address == identity(two_nodes).coordinator_address


def test_mpich():
    """Each process trained alone, a run of its own."""
    with pytest.raises(UserError, match="PMI_RANK=3 and PMI_SIZE=4: .* set distributed.coordinator_address=HOST:PORT"):
        identity(MPICH)
    found = identity(SLURM | MPICH, "distributed.coordinator_address=b:1")
    assert found == Identity("PMI_RANK and PMI_SIZE", "b:1", 4, 3, (1,))
    assert identity(MPICH | {"PMI_RANK": "0", "PMI_SIZE": "1"}) is None
    assert identity(SLURM | {"PMI_RANK": "5", "PMI_SIZE": "16"}).source == "Slurm"  # srun --mpi=pmi2


@pytest.mark.parametrize("launched", [MPI, SLURM])
def test_a_container_of_one_process_hides_no_launcher(launched):
    """A platform sets RANK and WORLD_SIZE for the command that it runs; torchrun and accelerate set LOCAL_RANK too."""
    container = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    assert identity(container) is None
    assert identity(launched | container) == identity(launched)
    assert identity(launched | container | {"LOCAL_RANK": "0"}) is None


def test_keys_win_over_the_environment():
    words = ["distributed.coordinator_address=b:1", "distributed.num_processes=2", "distributed.process_id=1"]
    assert identity(TORCHRUN, *words) == Identity("distributed.*", "b:1", 2, 1)
    assert identity(TORCHRUN, words[0]).coordinator_address == "b:1"
    assert identity(TORCHRUN, words[0]).process_id == 3
    assert identity(TORCHRUN, "distributed.local_device_ids=[0,2]").local_device_ids == (0, 2)
    assert identity(TORCHRUN | SLURM | MPI).source == "RANK and WORLD_SIZE"
    # mpirun in an `srun --pty bash`, and one that has started its daemons on the other nodes by srun
    for tasks in ("1", "2"):
        assert identity(SLURM | {"SLURM_STEP_NUM_TASKS": tasks} | MPI).source == "Open MPI"


@pytest.mark.parametrize(
    ("environment", "words", "said"),
    [
        (TORCHRUN | {"RANK": "4"}, [], "this is process 4, but the processes are 0 to 3"),
        (TORCHRUN | {"WORLD_SIZE": "four"}, [], "WORLD_SIZE=four"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, [], "MASTER_ADDR and MASTER_PORT must be set too"),
        (TORCHRUN | {"MASTER_PORT": "65535"}, [], "MASTER_PORT=65535"),
        (
            {},
            ["distributed.num_processes=2"],
            "distributed.coordinator_address and distributed.process_id must be set too",
        ),
        ({k: v for k, v in MPI.items() if "uri" not in k}, [], "set distributed.coordinator_address=HOST:PORT"),
        (TORCHRUN, ["distributed.coordinator_address=nohost"], "must be HOST:PORT"),
        ({}, ["distributed.local_device_ids=[0]"], "but this run has one process; use CUDA_VISIBLE_DEVICES instead"),
    ],
)
def test_contradictions(environment, words, said):
    with pytest.raises(UserError) as error:
        identity(environment, *words)
    assert said in str(error.value)


def test_jax_detectors_come_last(monkeypatch):
    monkeypatch.setattr(ClusterEnv, "_cluster_types", [])  # to which every subclass adds itself

    class Pods(ClusterEnv):
        name = "pods"

        is_env_present = classmethod(lambda cls: True)
        get_coordinator_address = classmethod(lambda cls, timeout_secs, override_coordinator_port: "pod-0:55527")
        get_process_count = classmethod(lambda cls: 4)
        get_process_id = classmethod(lambda cls: 3)

    pod = {"JOB_COMPLETION_INDEX": "3"}
    assert identity(pod) == Identity("JAX's detector pods", "pod-0:55527", 4, 3)
    assert identity(pod | TORCHRUN).source == "RANK and WORLD_SIZE"
    assert identity({}) is None
    monkeypatch.setattr(Pods, "get_process_count", classmethod(lambda cls: 1 / 0))
    with pytest.raises(UserError, match=r"detector of this cluster failed: division by zero; set distributed.coordi"):
        identity(pod)


def test_a_pod_without_the_package_of_kubernetes_is_told(monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.warns(UserWarning, match="kubernetes"):
        assert identity({"JOB_COMPLETION_INDEX": "0"}) is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "abc"}, "SLURM_STEP_TASKS_PER_NODE=abc, which must be like"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(xz)"}, "must be like"),
        (
            {"RANK": "²", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "RANK=², which must be a whole number",
        ),
        ({"RANK": "0", "WORLD_SIZE": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "0 processes"),
        ({"RANK": "0", "WORLD_SIZE": "2", "JAX_COORDINATOR_ADDRESS": "127.0.0.1:70000"}, "a port from 1 to 65535"),
    ],
)
def test_an_environment_that_nobody_means(environment, message):
    with pytest.raises(UserError, match=re.escape(message)):
        identity(environment)
