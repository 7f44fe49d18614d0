"""`python -m tunix.doctor` finds what would make training fail, and says whose it is."""

import json
import os
import socket
import subprocess
import sys
import time
from collections import namedtuple
from types import SimpleNamespace

import jax
import pytest
from support.devices import xla_flags
from support.harness import ONE_LAYER, ROOT, SMALL
from support.processes import Processes

from tunix import doctor
from tunix import doctor as machine
from tunix import doctor as software
from tunix import doctor as together
from tunix.base.errors import UserError
from tunix.base.files import find_existing
from tunix.config.compose import compose
from tunix.doctor import Finding
from tunix.processes.peers import find_blind
from tunix.training.choices import build_mesh


def of(check: str, found) -> list[tuple[str, str]]:
    return [(each.status, each.says) for each in found if each.check == check]


def test_two_processes(tmp_path):
    """Fit: files, clocks and links are looked at; then nothing is left behind."""
    mesh = "model.mesh_shape=[[2,2],[fsdp,cp]]"
    with Processes(
        *SMALL, *ONE_LAYER, mesh, "--json", folder=tmp_path, count=2, devices=2, module="tunix.doctor"
    ) as processes:
        ends = processes.ends(60)
    assert [end.code for end in ends] == [0, 0], ends[0].stdout + ends[0].stderr
    assert ends[1].stdout == ""
    found = json.loads(ends[0].stdout)
    assert found["fit"] is True
    assert len(found["hosts"]) == 2
    assert {(link["axis"], link["collective"]) for link in found["links"]} == {
        *(
            (axis, collective)
            for axis in ("fsdp", "cp")
            for collective in ("all-reduce", "all-gather", "reduce-scatter")
        ),
        *(("cp", collective) for collective in ("all-to-all", "collective-permute")),
    }
    assert all(link["bus_gb_per_s"] > 0 and link["group_size"] == 2 for link in found["links"])
    says = {each["check"]: each["says"] for each in found["findings"]}
    assert "is seen by 2 process(es)" in says["files"]
    assert "apart" in says["clocks"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stderr.0", "stderr.1", "stdout.0", "stdout.1"]


@pytest.mark.slow
def test_processes_that_differ(tmp_path):
    """Each has its own finding, the difference is one between them, and all end with 1."""
    flags = xla_flags(1)
    env = {"NCCL_PROTO": "LL", "XLA_FLAGS": f"{flags} --xla_gpu_enable_latency_hidding_scheduler=true"}
    one = Processes(
        *SMALL, *ONE_LAYER, folder=tmp_path, count=2, module="tunix.doctor", own=["", "checkpoint.max_to_keep=1"], **env
    )
    with one as processes:
        ends = processes.ends(60)
    assert [end.code for end in ends] == [1, 1], ends[0].stderr
    out = " ".join(ends[0].stdout.split())
    assert (
        "--xla_gpu_enable_latency_hidding_scheduler=true (did you mean --xla_gpu_enable_latency_hiding_scheduler?)"
        in out
    )
    assert f"process 1 ({socket.gethostname()}): " in out
    assert out.endswith("2 process(es): not fit to train, 1 error")


def test_alone_and_as_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NCCL_P2P_DISBLE", "1")
    monkeypatch.setattr(sys, "argv", ["tunix.doctor", *SMALL, *ONE_LAYER, "model.mesh_shape=[[8],[fsdp]]"])
    monkeypatch.setitem(together.PAYLOAD_MIB, "cpu", 1)
    assert doctor.main() == 0
    out = capsys.readouterr().out
    assert "warning variables        NCCL_P2P_DISBLE=1: nothing reads this name; did you mean NCCL_P2P_DISABLE?" in out
    assert "all-gather over fsdp (8 devices, " in out
    assert out.endswith("1 process(es): fit to train\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["training.seq_length=4"], 2, "here it is training.seq_len=4"),
        (["data=text", "data.paths=[nowhere]"], 2, "data.paths: nowhere does not exist"),
        (["model.mesh_shape=[[16],[fsdp]]"], 1, "fsdp=16 needs 16 devices"),
        (["distributed.coordinator_address=nowhere.invalid:1", "distributed.num_processes=2", "distributed.process_id=1"],
         1, "host nowhere.invalid is unknown here"),
    ],
    ids=["key", "data", "mesh", "coordinator"],
)  # fmt: skip
def test_wrong_input(more, code, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tunix.doctor", *SMALL, *ONE_LAYER, *more])
    monkeypatch.setattr(software, "_query_xla", lambda _: None)
    assert doctor.main() == code
    out, error = capsys.readouterr()
    assert message in (error if code == 2 else out)


def test_google_tunix_is_found(tmp_path, monkeypatch):
    info = tmp_path / "google_tunix-0.1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: google-tunix\nVersion: 0.1.5\n")
    assert [status for status, _ in of("versions", software.check_versions())] == ["ok"]
    monkeypatch.syspath_prepend(tmp_path)
    [_, (status, says)] = of("versions", software.check_versions())
    assert status == "error"
    assert says.startswith("google-tunix 0.1.5: it has a package called tunix too")


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({"jax": "0.11.1", "jaxlib": "0.11.1", "flax": "0.12.8"}, "jax 0.11.1 with flax 0.12.8: "),
        ({"jax": "0.11.1", "jaxlib": "0.10.2", "flax": "0.12.9"}, "jax 0.11.1 with jaxlib 0.10.2: "),
        ({"jax": "0.10.2", "jaxlib": "0.10.2", "jax-cuda13-plugin": "0.10.1"}, "jax-cuda13-plugin 0.10.1 with jaxlib 0.10.2: "),
        ({"jax": "0.10.2", "jaxlib": "0.10.2", "jax-cuda13-plugin": "0.10.2", "jax-cuda12-plugin": "0.10.2"}, "two CUDA plugins"),
        ({"jax": "0.9.0", "jaxlib": "0.9.0"}, "tunix needs jax 0.10.2 or newer"),
    ],
)  # fmt: skip
def test_versions_that_do_not_work_together(installed, message):
    [(first, _), (status, says)] = of("versions", software.check_versions(installed.get))
    assert (first, status) == ("ok", "error")
    assert message in says


def test_flags_that_kill_are_taken_out():
    given = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count='2' --xla_dump_too=/tmp --nonsense='"}
    found = of("XLA_FLAGS", software.check_xla_flags(given))
    assert (
        "error",
        "XLA does not know --xla_dump_too=/tmp (did you mean --xla_dump_to?); it would abort every process",
    ) in found
    assert given["XLA_FLAGS"] == "--xla_force_host_platform_device_count='2'"


def test_a_flag_with_a_wrong_value():
    """Named beside the unknown ones."""
    flags = "--xla_dump_too=/tmp --xla_force_host_platform_device_count=abc"
    says = [text for status, text in of("XLA_FLAGS", software.check_xla_flags({**os.environ, "XLA_FLAGS": flags}))]
    assert says[0].startswith("XLA cannot read the value of --xla_force_host_platform_device_count=abc; it would abort")
    assert says[1].startswith("XLA does not know --xla_dump_too=/tmp (did you mean --xla_dump_to?)")


@pytest.mark.nightly
def test_a_platform_that_is_not_here(tmp_path):
    """Told in a line by the doctor and by a run, with the variable that asks for it."""
    for words, code in ((["-m", "tunix.doctor"], 1), ([str(ROOT / "run_training.py")], 2)):
        done = subprocess.run(
            [sys.executable, *words, "model=tiny"], cwd=tmp_path, capture_output=True, text=True, check=False,
            env={**os.environ, "JAX_PLATFORMS": "rocm", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert "JAX_PLATFORMS=rocm: JAX finds no device" in " ".join((done.stdout + done.stderr).split())
        assert "Traceback" not in done.stderr


def test_names_of_variables():
    given = {
        "TUNIX_CACHE_DIRS": "a",
        "NCCL_IB_DISABLE": "1",
        "NCCL_ALGO": "Ring",
        "NCCL_VERSION": "2.28.3-1",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".9",
        "NCCLX": "",
        "NCCL_TIMEOUT_S": "60",
        "TUNIX_API_KEY": "hidden",
    }
    with jax.numpy_rank_promotion("raise"):
        found = of("variables", software.check_variables(given))
    unfit = "JAX_NUMPY_RANK_PROMOTION is raise, and a run needs allow: its step and its digits depend on it; unset it"
    waiting = "distributed.init_timeout_s and distributed.heartbeat_timeout_s say how long to wait"
    assert found == [
        ("warning", f"NCCL_TIMEOUT_S=60: nothing reads this name; {waiting}"),
        ("warning", "TUNIX_CACHE_DIRS=a: nothing reads this name; did you mean TUNIX_CACHE_DIR?"),
        ("warning", "NCCL_IB_DISABLE=1: nodes talk over TCP in place of InfiniBand"),
        ("error", unfit),
        (
            "ok",
            "NCCL_ALGO=Ring, NCCL_IB_DISABLE=1, NCCL_VERSION=2.28.3-1, TUNIX_API_KEY=***, "
            "XLA_PYTHON_CLIENT_MEM_FRACTION=.9",
        ),
    ]


def test_a_file_in_the_way_of_the_runs_folder(tmp_path):
    (tmp_path / "file").write_text("")
    assert find_existing(tmp_path / "file" / "run") == tmp_path / "file"
    with pytest.raises(UserError, match="file cannot be written: Not a directory"):
        find_blind(find_existing(tmp_path / "file" / "run"))


def test_what_is_short(tmp_path, monkeypatch):
    """A full disk, little memory, few open files, a small /dev/shm: for a model of 16 GB with its moments."""
    job = compose(
        ["model=gemma3_1b", "model.mesh_shape=[[8],[fsdp]]", "training.seq_len=128", f"hydra.run.dir={tmp_path}/a/b"]
    )
    gib, Space, Memory = 2**30, namedtuple("Space", "free"), namedtuple("Memory", "available")
    monkeypatch.setattr(
        machine.shutil, "disk_usage", lambda path: Space(30 * gib if "shm" not in str(path) else gib / 16)
    )
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: Memory(2 * gib))
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (256, 4096))
    found = list(machine.examine_machine(job))
    assert [status for status, _ in of("host memory", found)] == ["error"]
    assert [status for status, _ in of("open files", found)] == ["warning"]
    assert [status for status, _ in of("shared memory", found)] == ["warning"]
    [(status, says)] = of("disk", found)
    assert status == "warning"
    assert f"30.0 GiB free in {tmp_path}; " in says
    assert "at most 4 checkpoints (checkpoint.max_to_keep=2) need 44." in says  # the best, and one that is written
    monkeypatch.setattr(machine.peers, "num_on_host", lambda: 2)
    monkeypatch.setattr(machine.jax, "process_count", lambda: 4)
    [(_, of_two_hosts)] = of("host memory", machine.examine_machine(job))
    assert "a checkpoint takes 11.17 GiB" in of("host memory", found)[0][1]
    assert "a checkpoint takes 5.59 GiB" in of_two_hosts
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: Space(40 * gib))
    assert of("disk", machine.examine_machine(job))[0][0] == "warning"
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: Space(10 * gib))
    assert of("disk", machine.examine_machine(job))[0][0] == "error"


@pytest.mark.parametrize(("num_processes", "status"), [(1, "warning"), (2, "error")])
def test_a_host_without_a_known_name(num_processes, status, monkeypatch):
    def find_no_address(*_, **__):
        raise OSError("Name or service not known")

    monkeypatch.setattr(machine.socket, "gethostname", lambda: "nowhere.invalid")
    monkeypatch.setattr(machine.socket, "getaddrinfo", find_no_address)
    monkeypatch.setattr(machine.jax, "process_count", lambda: num_processes)
    says = "host name nowhere.invalid is unknown here; add it to /etc/hosts"
    assert list(machine._check_ports()) == [Finding("ports", status, says)]


def test_differences_between_processes(tmp_path, monkeypatch):
    """Three processes as `gather` would hear them: another flax, a clock an hour late, a folder of its own, a slow link."""
    flax, now = [{"flax": "0.12.8"}, {"flax": "0.12.9"}, {"flax": "0.12.8"}], time.time()
    answers = iter([flax, [now, now - 3600, now]])
    monkeypatch.setattr(together.peers, "gather", lambda value, name: next(answers))
    monkeypatch.setattr(together.peers, "agree", lambda value, name: value)
    monkeypatch.setattr(together, "find_blind", lambda folder: [1])
    found = list(
        together.compare(
            compose([f"hydra.run.dir={tmp_path}", "distributed.shared_filesystem=true"]), {"flax": "0.12.8"}
        )
    )
    assert of("same everywhere", found) == [("error", "flax differs: 0.12.8 on processes 0, 2; 0.12.9 on processes 1")]
    [(status, says)] = of("clocks", found)
    assert status == "warning"
    assert says.startswith("3600.0 s apart, process 1 most")
    [(status, says)] = of("files", found)
    assert status == "error"
    assert "not seen by processes 1; put hydra.run.dir on a disk that all processes share" in says
    assert not together.Diagnosis(["a"] * 3, [[], [], []], between=found).is_fit
    fast = together.Link("tp", 2, "all-reduce", 2**22, 0.01, 1, 0.011, 5.0, 0.008)
    slow = together.Link("dp", 2, "all-reduce", 2**22, 0.10, 3, 0.400, 0.5, 0.020)
    assert list(together.judge([fast, slow])) == [
        Finding("bandwidth", "ok", "all-reduce over tp (2 devices, 4 MiB): 5 GB/s on the bus"),
        Finding("bandwidth", "warning", "all-reduce over dp (2 devices, 4 MiB): 0.5 GB/s on the bus; "
                "the groups of process 3 take 4.0 x as long; 5.0 x what its links allow"),
        Finding("bandwidth", "ok", "the slowest axis is dp"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "driver", "errors"),
    [
        ("gpu", "580.65.06", []),
        ("gpu", "575.57.08", ["driver 575.57.08 is older than 580, which CUDA 13000 needs"]),
        ("cpu", "580.65.06", ["driver 580.65.06 is here, but jax has no GPU: install jax[cuda13]"]),
        ("cpu", None, []),
    ],
)
def test_drivers(backend, driver, errors, monkeypatch):
    client = SimpleNamespace(platform_version="PJRT C API\ncuda 13000")
    monkeypatch.setattr(machine.jax, "local_devices", lambda: [SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")])
    monkeypatch.setattr(machine.jax, "devices", lambda: [SimpleNamespace(client=client)])
    monkeypatch.setattr(machine.jax, "default_backend", lambda: backend)
    monkeypatch.setattr(machine, "_read_driver_version", lambda: driver)
    assert [says for status, says in of("devices", machine._check_devices()) if status != "ok"] == errors


def test_each_collective_moves_the_bytes_that_it_is_measured_by(monkeypatch):
    """Its results on all 8 devices: each has the whole array, but behind a reduce-scatter its part."""
    monkeypatch.setitem(together.PAYLOAD_MIB, "cpu", 1)
    monkeypatch.setattr(together, "_time", lambda work: [float(work().nbytes)])
    links = list(together.measure_links(build_mesh(compose(["model.mesh_shape=[[8],[cp]]"]).config), 8))
    expected = dict.fromkeys(together.COLLECTIVES, 8 * 2**20) | {"reduce-scatter": 2**20}
    assert {link.collective: link.time_s for link in links} == expected
    assert {link.num_bytes for link in links} == {2**20}


@pytest.mark.parametrize(("slowest_s", "status"), [(0.0014, "ok"), (0.0016, "warning")])
def test_a_process_whose_products_take_long(slowest_s, status, monkeypatch):
    monkeypatch.setattr(together, "_time", lambda work: [0.001, slowest_s, 0.001])
    says = f"a product takes 1.00 ms; process 1 is slowest, {1e3 * slowest_s:.2f} ms"
    assert list(together.find_slow_processes()) == [Finding("arithmetic", status, says)]


def test_a_variable_that_another_process_has_is_compared(tmp_path, monkeypatch):
    compared = {}
    answers = {"findings": [[], []], "variables": [[], ["NCCL_PROTO"]]}
    monkeypatch.setattr(together.peers, "hosts", lambda: ["a", "b"])
    monkeypatch.setattr(together.peers, "gather", lambda value, name: answers[name])
    monkeypatch.setattr(together, "compare", lambda job, info: compared.update(info) or [])
    monkeypatch.setattr(together, "find_slow_processes", list)
    together._examine_together(compose([f"hydra.run.dir={tmp_path}", "model.mesh_shape=[[16],[fsdp]]"]), [])
    assert "NCCL_PROTO" in compared
