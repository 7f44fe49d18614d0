"""`python -m tunix.launch`: which node this is, and that processes start, speak, and end together."""

import errno
import io
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.harness import ROOT
from support.processes import is_alive, wait_until

from tunix.base.errors import UserError
from tunix.launch import children, nodes
from tunix.launch.__main__ import main, parser, read_flags
from tunix.launch.nodes import Node, find_free_port, find_node, meet

LAUNCHED = str(ROOT / "tests" / "support" / "launched.py")
SEED = {"MASTER_ADDR": "192.0.2.10", "MASTER_PORT": "29500"}


def launch(*words: str, cwd: Path, **environment: str) -> subprocess.Popen:
    """`python -m tunix.launch ...` in a folder of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "RANK", "WORLD_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "tunix.launch", "--log-dir", "logs", *words], cwd=cwd, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**clean, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip


def ended(process: subprocess.Popen, timeout: float = 60) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, out, err


def wait_for(*files: Path) -> None:
    wait_until(lambda: all(file.exists() for file in files), str(files), 20)


def assert_gone(folder: Path) -> None:
    """No process of the run is left, neither the launched nor their children."""
    pids = [int(file.read_text()) for kind in ("pid", "child") for file in folder.glob(f"{kind}.*")]
    assert pids
    wait_until(lambda: not any(map(is_alive, pids)), f"the end of {pids}", 5)


@pytest.mark.parametrize(
    ("flags", "environment", "ranks"),
    [
        ("--nprocs=4", {}, [0, 1, 2, 3]),
        ("--nprocs=4", {**SEED, "RANK": "0", "WORLD_SIZE": "8"}, [0, 1, 2, 3]),
        ("--nprocs=4", {**SEED, "RANK": "4", "WORLD_SIZE": "8"}, [4, 5, 6, 7]),  # first global rank
        ("--nprocs=4", {**SEED, "RANK": "1", "WORLD_SIZE": "8"}, [4, 5, 6, 7]),  # number of the node
        ("--nprocs=2", {**SEED, "NODE_RANK": "2", "WORLD_SIZE": "8"}, [4, 5]),
        ("--nprocs=2 --node_rank=2", {**SEED, "RANK": "2", "WORLD_SIZE": "8"}, [4, 5]),
        ("--nprocs=2 --node-rank=1", {**SEED, "RANK": "2", "WORLD_SIZE": "8"}, [2, 3]),
        ("--nprocs=1", {**SEED, "RANK": "2", "WORLD_SIZE": "4"}, [2]),
        ("--nproc-per-node 2 --nnodes 2 --node-rank 1 --master-addr a --master-port 5", {}, [2, 3]),
        ("--nproc_per_node=2 --nnodes=2:2 --node_rank=1 --rdzv-backend=static --rdzv-endpoint=a:5", {}, [2, 3]),
        ("--standalone --nproc_per_node=2", {"RANK": "5", "WORLD_SIZE": "6"}, [0, 1]),
        ("--nprocs=gpu", {"CUDA_VISIBLE_DEVICES": "0,1,5"}, [0, 1, 2]),
        ("--nprocs=auto", {"CUDA_VISIBLE_DEVICES": "3"}, [0]),
        ("--nprocs=cpu", {}, list(range(os.cpu_count()))),
    ],
)  # fmt: skip
def test_which_node(flags, environment, ranks):
    node = find_node(asked(flags), environment)
    found = [node.environment(local) for local in range(node.num_processes)]
    assert [int(values["RANK"]) for values in found] == ranks
    assert [int(values["LOCAL_RANK"]) for values in found] == list(range(len(ranks)))
    assert {values["WORLD_SIZE"] for values in found} == {
        environment.get("WORLD_SIZE", found[0]["WORLD_SIZE"])
    } or "standalone" in flags
    if "MASTER_ADDR" in environment:
        assert (found[0]["MASTER_ADDR"], found[0]["MASTER_PORT"]) == ("192.0.2.10", "29500")


def asked(flags: str) -> Namespace:
    return parser().parse_args([*flags.split(), "script.py"])


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        ("--nprocs=2", {**SEED, "RANK": "2", "WORLD_SIZE": "8"}, "RANK=2 can be the first global rank of node 1, or the number of node 2 (4 nodes x 2 processes); say which with --node_rank"),
        ("--nprocs=4", {**SEED, "RANK": "3", "WORLD_SIZE": "8"}, "RANK=3 is neither a node's number nor its first global rank"),
        ("--nprocs=4", {**SEED, "RANK": "8", "WORLD_SIZE": "8"}, "RANK=8 is neither"),
        ("--nprocs=3", {**SEED, "RANK": "0", "WORLD_SIZE": "8"}, "WORLD_SIZE=8 is not a multiple of --nprocs=3"),
        ("--nprocs=4 --nnodes=3", {**SEED, "RANK": "0", "WORLD_SIZE": "8"}, "WORLD_SIZE=8, but --nnodes=3 x --nprocs=4 is 12"),
        ("--nprocs=4 --node_rank=1", {**SEED, "RANK": "2", "WORLD_SIZE": "8"}, "RANK=2 contradicts --node_rank=1: expected 4"),
        ("--nprocs=4 --node_rank=2", {**SEED, "WORLD_SIZE": "8"}, "--node_rank=2: the 2 nodes have the numbers 0 to 1"),
        ("--nprocs=4", {**SEED, "RANK": "4"}, "RANK=4 is set; WORLD_SIZE or --nnodes must be set too"),
        ("--nprocs=4", {**SEED, "WORLD_SIZE": "8"}, "which of the 2 nodes is this? Set --node_rank"),
        ("--nprocs=4", {"RANK": "4", "WORLD_SIZE": "8"}, "needs the address of node 0: set --master_addr"),
        ("--nprocs=4", {**SEED, "RANK": "0", "WORLD_SIZE": "eight"}, "WORLD_SIZE=eight: expected a whole number"),
        ("--standalone --nnodes=2", {}, "--standalone is a run of one node, --nnodes=2 of several"),
        ("--nnodes=0", {}, "--nnodes=0: must be at least 1"),
        ("--nnodes=2 --master_addr=a --node_rank=0 --master_port=70000", {}, "port 70000 of node 0: must be from 1 to 65534"),
        ("--nnodes=2 --master_addr=a --node_rank=0 --master_port=65535", {}, "port 65535 of node 0: must be from 1 to 65534"),
        ("--nprocs=many", {}, "--nprocs=many: expected a whole number, or one of gpu, cpu, auto"),
        ("--nnodes=2 --rdzv_backend=c10d", {}, "needs the address of node 0: set --rdzv_endpoint=HOST:PORT"),
        ("--nprocs=0", {}, "--nprocs=0: must be at least 1"),
        ("--nprocs=gpu", {"CUDA_VISIBLE_DEVICES": ""}, "--nprocs=gpu: no NVIDIA GPU here"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together(flags, environment, message):
    with pytest.raises(UserError) as error:
        find_node(asked(flags), environment)
    assert message in str(error.value)


@pytest.mark.parametrize("flag", ["node_rank", "nprocs", "log_dir", "rdzv_id"])
def test_a_flag_whose_value_is_two_dashes_has_none(flag, capsys):
    with pytest.raises(SystemExit, match="2"):
        asked(f"--{flag}=--")
    # Python 3.13 reads the dashes as a number first.
    assert re.search("expected one argument|invalid int value: '--'", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("endpoint", "address", "port"),
    [("a", "a", 29500), ("a:5", "a", 5), ("[fd00::2]:5", "fd00::2", 5), ("[fd00::2]", "fd00::2", 29500)],
)
def test_where_nodes_meet(endpoint, address, port):
    node = find_node(asked(f"--nnodes=2 --node_rank=1 --rdzv_endpoint={endpoint}"), {})
    assert (node.master_addr, node.master_port) == (address, port)


@pytest.mark.parametrize("flags", ["--master_addr=a --master_port=5", "--rdzv_endpoint=a:5"])
def test_a_flag_wins_over_the_environment(flags):
    node = find_node(asked(f"--nprocs=4 {flags}"), {**SEED, "RANK": "4", "WORLD_SIZE": "8"})
    assert (node.master_addr, node.master_port) == ("a", 5)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_nodes_meet(host):
    """Three nodes run the same command; each gets a number, and node 0 is at the address."""
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    port, found = find_free_port(), []
    run = {"rdzv_id": "job", "nnodes": 3, "nprocs": 2}
    threads = [threading.Thread(target=lambda: found.append(meet(host, port, 3, run, 10))) for _ in range(3)]
    threads[0].start()
    stranger = None
    while stranger is None and threads[0].is_alive():  # until node 0 listens
        with suppress(ConnectionRefusedError):
            stranger = socket.create_connection((host, port))  # someone else knocks
    stranger.sendall(b"GET / HTTP/1.1\r\n")
    stranger.close()
    with socket.create_connection((host, port)) as stranger:  # or speaks as the nodes do
        stranger.sendall(b"{}\n")
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1, 2]


@pytest.mark.parametrize("answer", [b'{"rank": "abc"}', b'{"rank": [1]}', b'{"rank": 7}', b"{}", b"x" * 300])
def test_a_stranger_in_the_place_of_node_0(answer, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr("tunix.launch.nodes.socket.socket.bind", refuse_address)  # the address is of another host

        def speak() -> None:
            peer, _ = server.accept()
            with peer:
                peer.sendall(answer + b"\n")

        thread = threading.Thread(target=speak, daemon=True)
        thread.start()
        run = {"rdzv_id": None, "nnodes": 2, "nprocs": 1}
        with pytest.raises(UserError, match="node 0 went away, or another program answers there"):
            meet("127.0.0.1", server.getsockname()[1], 2, run, 5)
        thread.join()


def refuse_address(_socket: socket.socket, _address: object) -> None:
    raise OSError(errno.EADDRNOTAVAIL, "not here")


def test_nodes_that_do_not_belong_together():
    port, said = find_free_port(), []

    def come(nprocs: int, timeout_s: float) -> None:
        with pytest.raises(UserError) as error:
            meet("127.0.0.1", port, 2, {"rdzv_id": None, "nnodes": 2, "nprocs": nprocs}, timeout_s)
        said.append(str(error.value))

    threads = [threading.Thread(target=come, args=(nprocs, 10)) for nprocs in (2, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("nprocs=" in text and "on node 0" in text for text in said), said
    said.clear()
    come(2, 0.3)
    assert said == ["--rdzv_endpoint: 1 of 2 nodes came within the time limit"]


ONE_MACHINE = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
enable_cpu_affinity: false
gpu_ids: all
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
TWO_MACHINES = (
    ONE_MACHINE.replace("num_machines: 1", "num_machines: 2") + "main_process_ip: 10.0.0.1\nmain_process_port: 29500\n"
)


def test_accelerate_config(tmp_path):
    """num_processes counts the processes of all machines, as accelerate counts them."""
    file = tmp_path / "accelerate.yaml"

    def found(flags: str, environment: dict[str, str]) -> Node:
        return find_node(*read_flags([f"--accelerate_config={file}", *flags.split(), "script.py"], environment))

    file.write_text(ONE_MACHINE)
    node = found("", {"RANK": "3", "WORLD_SIZE": "4"})
    assert (node.num_processes, node.world_size, node.master_addr) == (8, 8, "127.0.0.1")
    assert nodes.read_config(file).environment == {}
    assert found("--nnodes=2 --node_rank=1 --master_addr=a", {}).world_size == 16
    file.write_text(TWO_MACHINES)
    node = found("--node_rank=1", {})
    assert (node.num_processes, node.world_size, node.rank, node.master_port) == (4, 8, 1, 29500)
    assert found("", {"NODE_RANK": "1"}).rank == 1
    file.write_text(TWO_MACHINES.replace("machine_rank: 0", "machine_rank: 1"))
    assert found("--node_rank=0", {"NODE_RANK": "1"}).rank == 0  # flags win
    file.write_text(ONE_MACHINE.replace("use_cpu: false", "use_cpu: true"))
    assert nodes.read_config(file).environment == {"JAX_PLATFORMS": "cpu"}
    file.write_text(ONE_MACHINE.replace("gpu_ids: all", "gpu_ids: 2,3"))
    assert nodes.read_config(file).environment == {"CUDA_VISIBLE_DEVICES": "2,3"}
    file.write_text(f"{ONE_MACHINE}\nipex_config: {{}}\n")  # of a plugin that is not used
    assert nodes.read_config(file).num_machines == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "fsdp_config: {fsdp_version: 2}",
            "fsdp_config has no meaning here; remove it; choose training.sharding_strategy",
        ),
        ("distributed_type: FSDP", "set it to MULTI_GPU, and choose training.sharding_strategy"),
        (
            "mixed_precision: bf16",
            "mixed_precision=bf16: input should be 'no' or False; choose training.mixed_precision",
        ),
        ("distributed_type: DEEPSPEED", "distributed_type=DEEPSPEED"),
        ("num_processes: 7", "num_processes=7 is not a multiple of num_machines=2"),
        ("debug: true", "debug=True"),
        ("[", "cannot be read"),
    ],
)
def test_accelerate_config_that_is_not_understood(line, message, tmp_path, capsys):
    key = line.partition(":")[0]
    kept = [text for text in TWO_MACHINES.splitlines() if not text.startswith(f"{key}:")]
    file = tmp_path / "accelerate.yaml"
    file.write_text("\n".join([*kept, line]))
    assert main(["--accelerate-config", str(file), LAUNCHED, "exit:0"]) == 2
    assert message in capsys.readouterr().err


def test_output_goes_to_the_terminal_and_to_files(tmp_path):
    code, out, err = ended(launch("--nprocs", "3", LAUNCHED, "env", cwd=tmp_path))
    assert code == 0, err
    assert out.count("\n") == 1
    values = [eval((tmp_path / "logs" / f"train.{rank}.log").read_text()) for rank in range(3)]
    assert out.strip() == str(values[0])
    assert [value["LOCAL_RANK"] for value in values] == ["0", "1", "2"]
    assert len({value["MASTER_PORT"] for value in values}) == 1


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["exit:0"], 0),
        (["exit:75"], 75),
        (["exit:2"], 2),
        (["exit:0", "exit:3"], 3),
        (["exit:76", "exit:3"], 3),
        (["exit:76", "exit:75"], 76),
        (["exit:0", "die:6"], 76),  # JAX aborts a process that lost its peers
        (["exit:0", "die:9"], 137),
    ],
)
def test_exit_code_is_the_worst(words, code, tmp_path):
    assert ended(launch("--nprocs", "2", LAUNCHED, *words, cwd=tmp_path))[0] == code


def test_a_process_that_the_launcher_has_ended_says_nothing_of_the_reason():
    ends = [(137, True), (76, False), (75, True), (0, False)]
    parts: Any = [
        SimpleNamespace(rank=rank, code=code, was_stopped=stopped) for rank, (code, stopped) in enumerate(ends)
    ]
    assert children.find_worst(parts).code == 76
    assert children.find_worst(parts[:1]).code == 137


def test_one_death_ends_all(tmp_path):
    """The others are told, then killed (one ignores SIGTERM); the traceback is shown once."""
    process = launch("--nprocs=3", "--grace_s=0.5", LAUNCHED, "stubborn", "fail", "parent", cwd=tmp_path)
    code, _, err = ended(process, timeout=25)  # less than the default of --grace_s
    assert code == 1
    assert err.count("RuntimeError: trouble on rank 1") == 1
    assert "process 1 ended with exit code 1" in err
    assert_gone(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_signal_goes_to_all(number, tmp_path):
    process = launch("--nprocs=2", LAUNCHED, "saver", cwd=tmp_path)
    wait_for(tmp_path / "ready.0", tmp_path / "ready.1")
    process.send_signal(number)
    assert ended(process)[0] == 75
    told = "SIGUSR1" if number is signal.SIGUSR1 else "SIGTERM"
    assert [(tmp_path / f"saved.{rank}").read_text() for rank in range(2)] == [told, told]


def test_a_second_signal_kills(tmp_path):
    process = launch("--nprocs=2", LAUNCHED, "stubborn", cwd=tmp_path)
    wait_for(tmp_path / "ready.0", tmp_path / "ready.1")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == 137
    assert_gone(tmp_path)


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path):
    process = launch("--nprocs=2", LAUNCHED, "stubborn", cwd=tmp_path)
    wait_for(tmp_path / "ready.0", tmp_path / "ready.1")
    process.kill()
    process.wait()
    assert_gone(tmp_path)


def test_modules_and_programs(tmp_path):
    code, out, _ = ended(launch("--nprocs=2", "-m", "platform", cwd=tmp_path))
    assert (code, out.count("\n")) == (0, 1)
    # Its log is gone: a machine may clear /tmp of files to which nobody writes.
    script = "rm logs/train.$RANK.log; exit $((76 * RANK))"
    words = "--nprocs=2", "--log-dir=logs", "--no-python", "sh", "-c", script
    assert ended(launch(*words, cwd=tmp_path))[0] == 76


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.py"], "error: nowhere.py: no such file"),
        (["--no-python", "nowhere"], "no such program on the PATH"),
        (["--no-python", "--module", "notes"], "--module and --no_python exclude each other"),
        (["--log-dir", "/proc/x", LAUNCHED], "--log_dir=/proc/x cannot be written"),
        (["--log-dir", "/proc", LAUNCHED], "--log_dir: /proc/train.0.log cannot be written"),
        (["--no-python", "./notes"], "./notes cannot be started (Exec format error); a script begins with a line #!"),
    ],
)
def test_wrong_input(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("notes").write_text("echo one\n")
    Path("notes").chmod(0o755)
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_no_folder_for_temporary_files(monkeypatch, capsys):
    """As in a container whose disk is read-only."""
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    assert main([LAUNCHED]) == 2
    assert "--log_dir=(a temporary one) cannot be written (" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: SCRIPT\n"),
        (["--nnodes=two", LAUNCHED], "two: expected a whole number"),
        (["--grace-s=-5", LAUNCHED], "-5: expected a number of seconds, from 0 on"),
        (["--grace-s=soon", LAUNCHED], "soon: expected a number of seconds, from 0 on"),
        (["--multi_gpu", "--num_processes=2", LAUNCHED], "--multi_gpu is of accelerate; here it is --nprocs=gpu\n"),
        (["--num-processes", "2", LAUNCHED], "--num_processes is of accelerate; here it is --nprocs, which counts"),
    ],
)
def test_wrong_flags(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


class SlowTerminal(io.BytesIO):
    """A terminal whose reader takes each part only after a while."""

    def write(self, data) -> int:
        time.sleep(1.2)
        return super().write(data)


def test_the_last_output_reaches_a_slow_reader_and_a_program_left_behind_is_not_waited_for(tmp_path):
    source, writer = os.pipe()
    os.write(writer, b"a\nb\nc\n")
    copier = children.Copier(os.fdopen(source, "rb"), slow := SlowTerminal(), tmp_path / "log", b"0: ")
    copier.start()
    copier.finish([])
    assert slow.getvalue() == b"0: a\n0: b\n0: c\n"
    assert (tmp_path / "log").read_bytes() == b"a\nb\nc\n"
    assert copier.is_alive()  # `writer` is still open, as by a program left behind
    os.close(writer)
    copier.join()


def test_a_full_disk_under_the_log_stops_no_process(capsys):
    """Its output is read on, and the terminal has all of it."""
    source, writer = os.pipe()
    copier = children.Copier(os.fdopen(source, "rb"), terminal := io.BytesIO(), Path("/dev/full"), b"0: ")
    copier.start()
    for _ in range(3):
        os.write(writer, b"x" * 40_000 + b"\n")  # more than a pipe holds
    os.close(writer)
    copier.join(20)
    assert (copier.is_alive(), terminal.getvalue().count(b"\n")) == (False, 3)
    assert "/dev/full cannot be written (No space left on device); the terminal alone" in capsys.readouterr().err
