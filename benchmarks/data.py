"""The data path in figures: `python -m benchmarks.data`.

Tokenizing beside `datasets.map` with the same tokenizer on the same files; then, on a corpus of 1 GB of tokens (those
of the first part over and over), reading packed sequences in one thread, time to the first batch, and memory over an
epoch; last, the first batch at sample 0 and at sample 10^8.
"""

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from tunix.config.compose import compose
from tunix.data.batches import TrainBatches
from tunix.data.dataset import load_corpus, prepare_corpus
from tunix.data.packing import Sequences
from tunix.data.shards import Arrays, Prepared, Stream
from tunix.training.choices import build_mesh

SEQ_LEN = 2048
CORPUS = ["data=jsonl", f"training.seq_len={SEQ_LEN}"]
BY_TUNIX = """
import sys, time
from tunix.config.compose import compose
from tunix.data.dataset import prepare_corpus
cfg = compose(sys.argv[1:]).config
begun = time.perf_counter()
prepare_corpus(cfg)
print(time.perf_counter() - begun)
"""
BY_DATASETS = """
import sys, time
import datasets, tokenizers
file, path, bos, eos, processes, out = sys.argv[1:]
datasets.disable_progress_bars()
rows = datasets.load_dataset("json", data_files=file, split="train", cache_dir=out)
backend = tokenizers.Tokenizer.from_file(path)
def tokens(batch):
    found = backend.encode_batch_fast(batch["text"], add_special_tokens=False)
    return {"tokens": [[int(bos), *each.ids, int(eos)] for each in found]}
begun = time.perf_counter()
rows.map(tokens, batched=True, num_proc=int(processes), remove_columns=["text"])
print(time.perf_counter() - begun)
"""


def write_jsonl(path: Path, size: int) -> None:
    """The source of installed Python packages, a document a line, until there are `size` bytes."""
    with path.open("w") as file:
        for source in sorted(Path(np.__file__).parents[1].rglob("*.py")):
            file.write(json.dumps({"text": source.read_text(errors="ignore")}) + "\n")
            if file.tell() > size:
                return


def write_flat(path: Path, prepared: Prepared, size: int) -> None:
    """The prepared tokens over and over until there are `size` bytes."""
    stream = prepared.stream("train")
    with path.open("wb") as file:
        while file.tell() < size:
            for number in range(len(stream.sizes)):
                stream.shard(number).tokens.tofile(file)


def tokenizing(folder: Path) -> dict[str, float]:
    """MB of text a second by `tunix.prepare` and by `datasets.map`, in turn, each with all cores."""
    write_jsonl(folder / "text.jsonl", 64_000_000)
    size = sum(len(json.loads(line)["text"].encode()) for line in (folder / "text.jsonl").open())
    words = [*CORPUS, f"data.paths=[{folder}/text.jsonl]", "loading.shard_bytes=8_000_000"]
    _, vocab = prepare_corpus(compose([*words, f"loading.cache_dir={folder}/tokenizer"]).config)
    vocab.save(folder / "vocabulary")
    seconds: dict[str, list[float]] = {"tunix.prepare": [], "datasets.map": []}
    for turn in range(3):
        own = [*words, f"loading.cache_dir={folder}/cache{turn}", f"tokenizer.path={folder}/vocabulary"]
        seconds["tunix.prepare"].append(_printed_seconds(BY_TUNIX, *own))
        seconds["datasets.map"].append(
            _printed_seconds(
                BY_DATASETS, f"{folder}/text.jsonl", f"{folder}/vocabulary/tokenizer.json", str(vocab.bos),
                str(vocab.eos), str(os.cpu_count()), f"{folder}/datasets{turn}",
            )
        )  # fmt: skip
    prepared, _ = prepare_corpus(compose(own).config)
    write_flat(folder / "large.bin", prepared["jsonl"], 10**9)
    return {name: size / 1e6 / min(times) for name, times in seconds.items()}


def _printed_seconds(code: str, *words: str) -> float:
    """What a program prints last, run in a process of its own."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split()[-1])


def one_device() -> Mesh:
    return build_mesh(compose(["distributed.allow_idle_devices=true", "model.mesh_shape=[[1],[fsdp]]"]).config)


def reading(parts: dict[str, Sequences], packing: str) -> float:
    """Tokens a second of `TrainBatches.read` in one thread."""
    cfg = compose([f"training.seq_len={SEQ_LEN}", "training.micro_batch_size=16", f"loading.packing={packing}"]).config
    data = TrainBatches(parts, cfg, cfg.training, one_device())
    data.read(0)
    start_time, done = time.perf_counter(), 0
    while time.perf_counter() - start_time < 4:
        data.read(done)
        done += data.batch_size
    return done * SEQ_LEN / (time.perf_counter() - start_time)


def first_batch(words: list[str]) -> float:
    """Seconds from a config to the first batch, in a new process, of a corpus that is prepared."""
    code = (
        "import sys, time\nfrom tunix.config.compose import compose\nfrom tunix.data.batches import TrainBatches\n"
        "from tunix.data.dataset import load_corpus\nfrom benchmarks.data import one_device\nmesh = one_device()\n"
        "begun = time.perf_counter()\ncfg = compose(sys.argv[1:]).config\n"
        "TrainBatches(load_corpus(cfg).train, cfg, cfg.training, mesh).read(0)\nprint(time.perf_counter() - begun)"
    )
    return _printed_seconds(code, *words)


def memory_over_an_epoch(parts: dict[str, Sequences]) -> list[float]:
    """Peak memory of this process in MiB, not counting mapped files, at the quarters of an epoch."""
    cfg = compose([f"training.seq_len={SEQ_LEN}", "training.micro_batch_size=16"]).config
    data = TrainBatches(parts, cfg, cfg.training, one_device())
    epoch = sum(map(len, parts.values()))
    found = []
    for quarter in range(4):
        for first in range(quarter * epoch // 4, (quarter + 1) * epoch // 4, data.batch_size):
            data.read(first)
        status = Path("/proc/self/status").read_text()
        found.append(int(status.split("RssAnon:")[1].split()[0]) / 2**10)
    return found


def seek(folder: Path) -> dict[str, float]:
    """Seconds to the first batch at samples 0 and 10^8 of a simulated corpus: a sparse file of 2.2 x 10^8 sequences."""
    count = int(2.2e8) * 128
    with (folder / "sparse.bin").open("wb") as file:
        file.truncate(count * 2)
    tokens = np.memmap(folder / "sparse.bin", np.uint16, "r")
    arrays = Arrays(tokens, np.arange(0, count, 2**16))
    stream = Stream([(count, len(arrays.starts))], lambda number: arrays, "sparse")
    cfg = compose(["training.seq_len=128"]).config
    data = TrainBatches({"sparse": Sequences(stream, 128, "concat", folder)}, cfg, cfg.training, one_device())
    data.read(7)
    times: dict[int, list[float]] = {0: [], 10**8: []}
    for turn in range(40):
        for first, seconds in times.items():  # in turn, so that what else the machine does is the same for both
            start_time = time.perf_counter()
            next(data.iterate([first + turn * data.batch_size]))
            seconds.append(time.perf_counter() - start_time)
    return {f"sample {first:.0e}": statistics.median(seconds) for first, seconds in times.items()}


def main() -> None:
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as temporary:
        folder = Path(temporary)
        os.environ["TUNIX_CACHE_DIR"] = f"{folder}/cache"
        speeds = tokenizing(folder)
        ratio = speeds["tunix.prepare"] / speeds["datasets.map"]
        print(f"machine: {os.cpu_count()} x {platform.machine()}, Python {platform.python_version()}")
        print(
            "tokenizing:", ", ".join(f"{name} {speed:.2f} MB/s" for name, speed in speeds.items()), f"= {ratio:.2f} x"
        )
        words = [
            "data=tokens",
            f"data.paths=[{folder}/large.bin]",
            "data.document_end=2",
            f"training.seq_len={SEQ_LEN}",
        ]
        words += [f"tokenizer.path={folder}/vocabulary", f"loading.cache_dir={folder}/cache"]
        for packing in ("concat", "best_fit", "pad"):
            start_time = time.perf_counter()
            corpus = load_corpus(compose([*words, f"loading.packing={packing}"]).config)
            print(f"{packing}: made in {time.perf_counter() - start_time:.1f} s; {corpus.summary}")
            print(f"{packing}: {reading(corpus.train, packing) / 1e6:.1f} M tokens/s in one thread")
        print(f"first batch of 1 GB, prepared: {first_batch([*words, 'loading.packing=best_fit']):.2f} s")
        print(
            "anonymous memory at the quarters of an epoch, MiB:", [round(x) for x in memory_over_an_epoch(corpus.train)]
        )
        print("peak resident memory, MiB:", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 2**10)
        print("time to a batch:", {name: f"{seconds * 1e3:.2f} ms" for name, seconds in seek(folder).items()})


if __name__ == "__main__":
    main()
