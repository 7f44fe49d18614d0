"""`training.profile_communication`: bytes as compiled, times as traced, nothing outside the traced steps."""

import csv
import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from jax.profiler import ProfileData
from PIL import Image, ImageColor
from support import installs
from support.harness import ONE_LAYER, RUN, metrics
from support.processes import Processes
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tunix.base.errors import UserError
from tunix.config.compose import compose
from tunix.costs import trace_analysis
from tunix.costs.communication import Transfer, predict_seconds
from tunix.costs.devices import read_device_kinds
from tunix.costs.hlo import Collective, read_collectives
from tunix.costs.step import derive
from tunix.costs.trace_analysis import (
    COLOURS,
    EXPOSED,
    UNKNOWN,
    compute_device_times,
    format_scope,
    measure,
    plot_communication,
    predict,
    read_events,
)
from tunix.run.trace import CommunicationTrace
from tunix.sharding.table import axis_names
from tunix.trainer import run
from tunix.training.choices import build_mesh
from tunix.training.train_spec import assemble

TRACED = ["training.profile_communication=true", "profile.after_step=2", "profile.steps=2"]
MESH = "model.mesh_shape=[[2,2,2],[dp,fsdp,tp]]"
SIZES = dict.fromkeys(axis_names(), 1) | {"dp": 2, "fsdp": 2, "tp": 2}


@pytest.fixture(scope="module")
def words(corpus) -> list[str]:
    return [*RUN, *ONE_LAYER, "data=text", f"data.paths=['{corpus}']", *TRACED]


@pytest.fixture(scope="module")
def outputs(words, tmp_path_factory):
    """The outputs folder with a run of two processes in it, outputs/run; both were traced."""
    folder = tmp_path_factory.mktemp("traced")
    more = [MESH, "training.max_steps=4", "profile.ranks=null", "hydra.run.dir=outputs/run"]
    with Processes(*words, *more, folder=folder, count=2, devices=4) as processes:
        assert [end.code for end in processes.ends()] == [0, 0], (folder / "stderr.0").read_text()
    return folder / "outputs"


def table(path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_report_of_a_run(words, outputs):
    """Every execution of every collective of the compiled step is found in the traces, on the devices of both processes."""
    folder = outputs / "run/profile"
    assert sorted(path.name for path in folder.iterdir()) == [
        "communication.csv", "communication.png", "communication.txt", "plugins",
    ]  # fmt: skip
    text = (folder / "communication.txt").read_text()
    assert text.startswith("steps 3 to 4, 8 devices traced")
    assert "INCOMPLETE" not in text
    rows = table(folder / "communication.csv")
    assert {"fsdp", "tp", "dp", "dp+fsdp"} <= {row["axes"] for row in rows}
    assert {"blocks/mlp forward", "blocks/mlp recomputed", "optimizer update"} <= {row["scope"] for row in rows}
    assert all(0 <= float(row["exposed_s"]) <= float(row["time_s"]) for row in rows)
    assert all(float(row["time_s"]) > 0 for row in rows)
    assert sum(float(row["exposed_s"]) for row in rows) > 0.5 * sum(float(row["time_s"]) for row in rows)  # CPUs wait
    assert milliseconds(text, "step") < 1000 * sum(line["step_time_s"] for line in metrics(outputs / "run"))
    derived = predict(derive(compose([*words, MESH]).config, SIZES, "cpu").transfers, SIZES, None, 8)
    for axis in ("fsdp", "tp"):  # weights, and tokens that enter branches
        gathered = sum(int(row["bytes_per_step"]) for row in rows if (row["kind"], row["axes"]) == ("all-gather", axis))
        assert gathered == pytest.approx(derived["all-gather", (axis,)].num_bytes, rel=0.02)
    traces = sorted((folder / "plugins/profile/after_step_2").glob("*.xplane.pb"))
    assert [trace.name for trace in traces] == [f"{socket.gethostname()}_{rank}.xplane.pb" for rank in range(2)]
    assert sum(trace.stat().st_size for trace in traces) < 20 * 2**20
    shown = EventAccumulator(str(outputs / "run"))
    shown.Reload()
    [image] = shown.Images("communication_by_axis")
    assert image.encoded_image_string == (folder / "communication.png").read_bytes()
    assert image.width > image.height > 200
    assert "communication" in shown.Tags()["tensors"]


def milliseconds(text: str, of: str) -> float:
    return float(re.search(rf"^{of} ([\d,.]+) ms", text, re.MULTILINE)[1].replace(",", ""))


CHROMIUM = (
    "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync",
    "--disable-component-update", "--no-first-run", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--window-size=1300,850", "--virtual-time-budget=15000",
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.slow
def test_tensorboard_in_a_browser(outputs, tmp_path):
    """Scalars, text, the image and the trace of `tensorboard --logdir outputs/`, as chromium shows them."""
    installs.apt(("chromium",), ("chromium", "fonts-dejavu-core"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}"
    port = address.rpartition(":")[2]
    words = [Path(sys.executable).parent / "tensorboard", "--logdir", outputs, "--host=127.0.0.1", f"--port={port}"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen([*words, "--load_fast=false"], stdout=log, stderr=log, start_new_session=True)

    def fetch(path: str) -> str:
        with urllib.request.urlopen(f"{address}/data/plugin/{path}", timeout=20) as answer:
            body = answer.read()
        return (gzip.decompress(body) if body.startswith(b"\x1f\x8b") else body).decode()

    def browse(path: str, *flags: str) -> str:
        words = [*CHROMIUM, f"--user-data-dir={tmp_path}/chromium", *flags, f"{address}/{path}"]
        return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout

    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with suppress(OSError):
                if "communication_by_axis" in fetch("images/tags") and json.loads(fetch("profile/runs")):
                    break
            time.sleep(0.5)
        assert json.loads(fetch("profile/runs")) == ["run/profile/after_step_2"]
        assert "by mesh axis" in fetch("text/text?run=run&tag=communication")
        series = browse("#timeseries", "--dump-dom")
        assert "communication_by_axis" in series
        assert "held_out" in series
        shown = re.sub(r"<[^>]*>|\s+", " ", browse("data/plugin/profile/index.html", "--dump-dom"))
        assert "run/profile/after_step_2" in shown
        assert "Average Step Time" in shown
        browse("#images", f"--screenshot={tmp_path}/images.png")
        with Image.open(tmp_path / "images.png") as screen:
            colours = {colour for _, colour in screen.convert("RGB").getcolors(2**24)}
        assert ImageColor.getrgb(COLOURS[EXPOSED]) in colours
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(20)


GPU_TRACE = """
planes { name: "/device:GPU:0"
  lines { name: "Stream #13(Compute)" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 4000000 stats { metadata_id: 1 str_value: "fusion.1" } stats { metadata_id: 2 str_value: "jit_train_step" } }
    events { metadata_id: 1 offset_ps: 9000000 duration_ps: 1000000 stats { metadata_id: 1 str_value: "fusion.2" } stats { metadata_id: 2 str_value: "jit_train_step" } } }
  lines { name: "Stream #14(Memcpy,Compute)" timestamp_ns: 1000
    events { metadata_id: 2 offset_ps: 1000000 duration_ps: 5000000 stats { metadata_id: 1 str_value: "all-gather-start.3" } stats { metadata_id: 2 str_value: "jit_train_step" } }
    events { metadata_id: 2 offset_ps: 7000000 duration_ps: 1000000 }
    events { metadata_id: 2 offset_ps: 9000000 duration_ps: 500000 stats { metadata_id: 1 str_value: "reduce-scatter.5" } stats { metadata_id: 2 str_value: "jit_train_step" } }
    events { metadata_id: 2 offset_ps: 8000000 duration_ps: 1000000 stats { metadata_id: 1 str_value: "all-gather.9" } stats { metadata_id: 2 str_value: "jit_evaluate" } } }
  lines { name: "XLA Ops" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 9000000 stats { metadata_id: 1 str_value: "all-gather-start.3" } stats { metadata_id: 2 str_value: "jit_train_step" } } }
  event_metadata { key: 1 value { id: 1 name: "loop_fusion" } }
  event_metadata { key: 2 value { id: 2 name: "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "hlo_module" } } }
planes { name: "/host:CPU"
  lines { name: "thread"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 9000000 stats { metadata_id: 1 str_value: "all-gather-start.3" } stats { metadata_id: 2 str_value: "jit_train_step" } } }
  event_metadata { key: 1 value { id: 1 name: "all-gather-start.3" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "hlo_module" } } }
"""


def test_kernels_of_a_gpu():
    """Written by hand as XLA's CUPTI collector writes them: 5 us of a gather, 3 of them beside a fusion."""
    trace = ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(GPU_TRACE))
    names = {"all-gather-start.3"}
    found = compute_device_times(read_events(trace, "jit_train_step", names), 1, names, set())
    assert found.keys() == {"0"}
    assert found["0"].collectives["all-gather-start.3"] == (1, pytest.approx(5e-6), pytest.approx(2e-6))
    assert found["0"].collectives[UNKNOWN] == (2, pytest.approx(1.5e-6), pytest.approx(1e-6))
    assert found["0"].span_s == pytest.approx(10e-6)
    assert found["0"].communication_s == pytest.approx(6.5e-6)
    assert found["0"].exposed_s == pytest.approx(3e-6)

    gather = Collective(
        "all-gather-start.3", "all-gather", "bf16", 10_000, (0, 1, 2, 3), 2, "jit(train_step)/jvp(blocks)/mlp/reshard"
    )
    kind, sizes = read_device_kinds()["h200"], dict.fromkeys(axis_names(), 1) | {"fsdp": 4}
    transfer = Transfer("all-gather", ("dp", "fsdp"), 30_000)
    communication = measure(4, 1, found, [gather], sizes, predict([transfer], sizes, kind, 4))
    [row] = communication.rows
    assert row.num_bytes == 20_000
    assert row.algorithm_gb_per_s == pytest.approx(4.0)
    assert row.bus_gb_per_s == pytest.approx(3.0)
    assert communication.num_lost == 1  # of two executions
    predicted = communication.predicted["all-gather", ("fsdp",)]
    assert predicted.num_bytes == 30_000
    assert predicted.time_s == pytest.approx(predict_seconds(transfer, sizes, kind, 4))
    text = trace_analysis.format_text(communication)
    assert "INCOMPLETE: the trace lacks 1 executions" in text
    assert "0.002 ms of NCCL kernels for which the trace names no instruction" in text
    assert plot_communication(communication).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ("tp",)),
        ("replica_groups=[4,2]<=[4,2]T(1,0), dimensions={0}", ("fsdp",)),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", ("dp", "fsdp")),
        ("replica_groups=[1,8]<=[8]", ("dp", "fsdp", "tp")),
        ("replica_groups=mesh['a'=4,'b'=1,'c'=2] {'c'}", ("tp",)),
        ("replica_groups=mesh['a'=4,'b'=2] {'a':(2)2}", ("fsdp",)),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", ("tp",)),
        ("source_target_pairs={{0,0},{1,5},{5,1}}", ("dp",)),
    ],
)  # fmt: skip
def test_axes_of_a_collective(groups, axes):
    kind = "collective-permute" if groups.startswith("source") else "all-reduce"
    hlo = f"ENTRY %main (p: f32[8]) -> f32[8] {{\n  %x.1 = f32[8]{{0}} {kind}(%p), channel_id=1, {groups}, metadata={{}}\n}}"
    [found] = read_collectives(hlo)
    assert found.name == "x.1"
    assert found.find_axes({"dp": 2, "fsdp": 2, "tp": 2}) == axes


@pytest.mark.parametrize(
    ("instruction", "num_bytes"),
    [
        ("((bf16[4,8]{1,0}), (bf16[4,8]{1,0})) all-to-all-start(%p)", 64),
        ("(f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p)", 32),
        ("(bf16[2]{0}, bf16[8]{0}) all-gather-start(%p)", 16),
        ("f32[8]{0} all-reduce-start(%p)", 32),
        ("(bf16[4]{0}, bf16[4]{0}) all-to-all(%p, %q)", 16),  # two results of a synchronous one
    ],
)
def test_an_asynchronous_collective_is_counted_once(instruction, num_bytes):
    hlo = f"ENTRY %main (p: f32[8]) -> f32[8] {{\n  %x.1 = {instruction}, replica_groups=[1,8]<=[8]\n}}"
    assert [each.num_bytes for each in read_collectives(hlo)] == [num_bytes]


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        ("jit(f)/while/body/closed_call/jvp(blocks)/while/body/closed_call/mlp/reshard", "blocks/mlp forward"),
        ("jit(f)/while/body/eval_jaxpr/jvp(blocks)/while/body/eval_jaxpr/mlp/reshard", "blocks/mlp forward"),  # JAX 0.11
        ("jit(f)/transpose(jvp(blocks))/checkpoint/rematted_computation/mlp/BTF,FD->BTD/dot_general", "blocks/mlp recomputed"),
        ("jit(f)/transpose(jvp(blocks))/checkpoint/(attention/reshard:mlp/reshard:mlp/reshard)", "blocks/attention + blocks/mlp backward"),
        ("jit(f)/optimizer/reduce_sum", "optimizer update"),
        ("", ""),
    ],
)  # fmt: skip
def test_names_of_scopes(stack, words):
    assert format_scope(stack) == words


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["training.max_steps=3"], "profile.after_step=2 and profile.steps=2 need 4 steps, the run has 3"),
        (["profile.ranks=[0,1]"], "profile.ranks=[0, 1]: the run has processes 0 to 0"),
        (["profile.ranks=[]"], "profile.ranks=[]"),
        (["profile.steps=0"], "profile.steps=0"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_input(more, message, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        run(compose([*words, *more, "hydra.run.dir=run"]))
    assert message in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_run_that_ends_within_the_window_leaves_no_trace(words, tmp_path, caplog):
    cfg = compose(words).config
    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh):
        program = assemble(cfg, mesh)
    for _ in range(2):  # a trace that goes on would forbid a second
        with CommunicationTrace(program, mesh, tmp_path, None) as trace:
            trace.at(2, {}, None)
    assert "there is no report" in caplog.text
    trace.warn_if_past(2)
    assert "no trace: resumed at step 2; profile.after_step must be at least 3" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_finds_no_room_ends_no_run(words, tmp_path, caplog, monkeypatch):
    cfg, stop = compose(words).config, jax.profiler.stop_trace

    def fail() -> None:
        stop()
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: a.xplane.pb; No space left on device")

    monkeypatch.setattr(jax.profiler, "stop_trace", fail)
    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh), CommunicationTrace(assemble(cfg, mesh), mesh, tmp_path, None) as trace:
        trace.at(2, {}, None)
        trace.at(4, {}, SimpleNamespace(as_text=lambda: "HloModule step"))
    assert f"the trace cannot be written to {tmp_path}, and the run goes on: RESOURCE_EXHAUSTED" in caplog.text
    assert list(tmp_path.iterdir()) == []  # the room is for the rest of the run
    with jax.set_mesh(mesh), CommunicationTrace(trace.train_spec, mesh, tmp_path, None) as trace:
        trace.at(2, {}, None)  # the run ends now, and the disk is not why
    assert list(tmp_path.iterdir()) == []
