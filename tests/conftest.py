"""Eight fake CPU devices for every test; a small corpus of made-up text; caches in the session's own folder."""

import gc
import os
import signal
import sys

from support.devices import xla_flags

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {xla_flags(8)}"
os.environ["JAX_PLATFORMS"] = "cpu"
# An operation of a program knows one line of the code that made it: XLA takes half as long again with JAX's hundred.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "1"
# The processes that tests start share the compiled code of tunix: without it each one compiles all files again.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""  # empty: not set
# A shell starts what it runs in the background with Ctrl-C ignored, and all processes of tests would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import random
from pathlib import Path

import hypothesis
import pytest
from support import composing, forks

sys.dont_write_bytecode = False  # the same for this process
if not forks.PLAIN:
    composing.remember()
# And the next session shares that of the tests: pytest takes 3 s to rewrite the asserts.
sys.dont_write_bytecode = False
# A machine with other work is slow at making input: no fault of a test.
hypothesis.settings.register_profile("tests", suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tests")
ROOT = Path(__file__).parents[1]
KEPT = ROOT / ".cache"  # for the next session: compiled programs, installed packages; `make clean`


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run the nightly cases, too; see CONTRIBUTING.md")


def is_nightly(item: pytest.Item) -> bool:
    """Return whether a case is marked `nightly`, and is none of those that its mark names as run each time."""
    if (mark := item.get_closest_marker("nightly")) is None:
        return False
    callspec = getattr(item, "callspec", None)
    return callspec is None or callspec.id not in mark.kwargs.get("but", ())


def check_exceptions(items: list[pytest.Item]) -> None:
    """Raise `pytest.UsageError` where a mark `nightly` names a case that is none: it would never run each time."""
    requested, ids = set(), set()
    for item in items:
        if mark := item.get_closest_marker("nightly"):
            requested |= {(item.originalname, name) for name in mark.kwargs.get("but", ())}
            ids.add((item.originalname, item.callspec.id if hasattr(item, "callspec") else None))
    if missing := sorted(requested - ids):
        raise pytest.UsageError(f"@pytest.mark.nightly(but=...) names cases that are not there: {missing}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the nightly cases that are not asked for, and start the long ones first.

    A case that the command names by its test (`FILE::TEST`) is always run.
    """
    nightly = {item for item in items if is_nightly(item)}
    named = any("::" in word for word in config.args)
    if not named:
        check_exceptions(items)
    left_out = set() if named or config.getoption("--nightly") else nightly
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    # No worker is alone with a long case at the end.
    items[:] = sorted(
        (item for item in items if item not in left_out),
        key=lambda item: (item not in nightly, item.get_closest_marker("slow") is None),
    )


@pytest.fixture(scope="session", autouse=True)
def rare_garbage_collection() -> None:
    """Tracing makes many objects that live on: looking at them again and again takes a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)


@pytest.fixture(scope="session", autouse=True)
def no_announcements() -> None:
    """Tests compare what a command prints, and on a busy machine everything takes long (`tunix.base.progress.announcing`)."""
    from tunix.base import progress

    progress.QUIET_S = progress.REPEAT_S = 1e6


@pytest.fixture(scope="session", autouse=True)
def cache_dir(tmp_path_factory) -> Path:
    """Shared by all workers of one test session."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "cache"
    os.environ["TUNIX_CACHE_DIR"] = str(folder)
    import jax

    # The same small programs are compiled in many tests, and in most sessions of tests.
    for name, value in (
        ("compilation_cache_dir", os.environ.get("TUNIX_TEST_COMPILED", str(KEPT / "compiled"))),
        ("persistent_cache_min_compile_time_secs", 0),
        ("persistent_cache_min_entry_size_bytes", 0),
    ):
        jax.config.update(f"jax_{name}", value)
        os.environ[f"JAX_{name.upper()}"] = str(value)
    return folder


@pytest.fixture(scope="session")
def installs_dir() -> Path:
    return KEPT / "installed"


def write_corpus(folder: Path, num_documents: int = 60, words: int = 120, seed: int = 0) -> Path:
    """Documents of random words that follow one another with some regularity: there is something to learn."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    vocab = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(40)]
    for number in range(num_documents):
        word, text = rng.randrange(40), []
        for _ in range(words):
            word = (word * 3 + rng.choice([1, 1, 1, 2])) % 40
            text.append(vocab[word])
        (folder / f"{number:03}.txt").write_text(" ".join(text) + "\n")
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def hf_dir(tmp_path_factory) -> Path:
    """Read by all tests, changed by none."""
    from support.hf_files import write_hf_dir

    return write_hf_dir(tmp_path_factory.mktemp("hf"))
