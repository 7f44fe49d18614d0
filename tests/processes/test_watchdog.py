"""The watchdog's thread ends before the block that it watches is left."""

import threading

import pytest

from tunix.cli.compose import compose
from tunix.processes import peers, watchdog


@pytest.mark.parametrize("fails", [False, True])
def test_no_thread_is_left_when_the_run_ends(fails, monkeypatch):
    """A thread inside jaxlib at the end of Python aborts the process, with code 134 after a success."""
    inside, leave = threading.Event(), threading.Event()

    def published(folder: str) -> dict[str, str]:
        inside.set()  # stands for the call into jaxlib, which takes its time
        leave.wait(0.3)
        return {}

    monkeypatch.setattr(watchdog, "POLL_S", 0)
    monkeypatch.setattr(peers, "published", published)
    dog = watchdog.Watchdog(compose([]).config.distributed)
    try:
        with dog:
            assert inside.wait(10)
            if fails:
                raise OSError("no space left")
    except OSError:
        pass
    assert not dog.thread.is_alive()


def test_a_deadline_leaves_no_thread():
    before = threading.active_count()
    with peers.deadline(1000, "nothing happened"):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
