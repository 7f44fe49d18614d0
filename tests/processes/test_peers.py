"""Agreement of processes through the store of JAX's runtime, whose place a stand-in takes here."""

import json
import logging
import os
import threading
import time
from pathlib import Path

import jax
import pytest

from tunix import trainer
from tunix.base.errors import UserError
from tunix.config.compose import compose
from tunix.processes import peers


class Store:
    """The store as the last of two processes to come sees it: the other one has set its text already."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.limits_ms: list[int] = []
        self.barriers: set[str] = set()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self.texts |= {key: value, key[:-1] + "1": '"theirs"'}

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        return [(key, value) for key, value in self.texts.items() if key.startswith(folder)]

    def key_value_delete(self, key: str) -> None:
        self.texts = {name: value for name, value in self.texts.items() if not name.startswith(f"{key}/")}

    def wait_at_barrier(self, name: str, limit_ms: int) -> None:
        self.barriers.add(name)
        self.limits_ms.append(limit_ms)


@pytest.fixture
def store(monkeypatch) -> Store:
    store = Store()
    monkeypatch.setattr(peers, "_find_store", lambda: store)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    return store


def test_work_of_one_process_may_take_hours(store):
    """An export whose files take longer to digest must not be thrown away; heartbeats find a process that dies."""
    peers.agree("ours", "the folder")
    peers.barrier("the folder is there")
    assert min(store.limits_ms) > 24 * 3600 * 1000


def test_a_process_that_waits_for_the_others_handles_signals(store, monkeypatch):
    """Ctrl-C and SIGUSR1 did nothing where another process prepared its data: the main thread was inside jaxlib."""
    waits: list[threading.Thread] = []
    monkeypatch.setattr(store, "wait_at_barrier", lambda *_: waits.append(threading.current_thread()))
    peers.barrier("the data")
    assert waits != [threading.main_thread()]


def test_the_store_keeps_the_texts_of_the_newest_gather_alone(store):
    """Another process may still read them. Those before would fill the memory of process 0."""
    for number in range(4):
        assert peers.gather(f"ours {number}", "scores") == [f"ours {number}", "theirs"]
        assert list(store.texts.values()) == [f'"ours {number}"', '"theirs"']
    assert len(store.barriers) == 1  # their names are kept too


def test_a_setting_of_one_host_ends_every_process(monkeypatch):
    """The others were aborted by JAX's runtime a heartbeat's time later, and did not say why."""
    told: list[str] = []
    monkeypatch.setattr(trainer, "list_unfit_settings", lambda: ["JAX_ENABLE_X64 is True"])
    monkeypatch.setattr(peers, "gather", lambda text, *_: told.append(text) or [text])
    with pytest.raises(UserError, match="JAX_ENABLE_X64"):
        trainer.try_out(compose([]).config)
    assert told == ["JAX_ENABLE_X64 is True"]


def test_a_process_without_a_device_says_so(store, monkeypatch):
    """JAX does not know the number of a process whose devices it does not find: the process ended by a traceback."""

    def no_device() -> int:
        raise RuntimeError("Unable to initialize backend 'cuda'")

    ended: list[int] = []
    monkeypatch.setattr(jax, "process_index", no_device)
    monkeypatch.setattr(jax, "process_count", no_device)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(peers.runtime.global_state, "process_id", 2)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    monkeypatch.setattr(os, "_exit", ended.append)
    peers.leave(2, "JAX finds no device")
    assert ended == [2]
    assert json.loads(store.texts["tunix/failed/2"])["why"] == "JAX finds no device"


def test_a_process_that_waits_for_the_devices_of_all_ends_with_the_one_that_has_none(store, monkeypatch, capsys):
    """It was aborted a heartbeat's time later, with 76, after which a cluster starts the run again; nobody was named."""
    ended, reason = threading.Event(), "process 1 (a) failed: JAX finds no device"

    def leave(*given: object) -> None:
        assert given == (2, reason)
        ended.set()
        raise SystemExit

    monkeypatch.setattr(peers, "leave", leave)
    before = threading.active_count()
    with peers.following_failures():
        store.texts["tunix/failed/1"] = json.dumps({"code": 2, "why": "JAX finds no device", "host": "a"})
        assert ended.wait(10)
    assert capsys.readouterr().err == f"error: {reason}\n"
    assert threading.active_count() == before


@pytest.mark.parametrize(("code", "own"), [(2, 2), (77, 77), (1, 76), (130, 76)])
def test_an_error_behind_the_end_of_another_process_has_its_reason_and_its_code(code, own, store, monkeypatch):
    """A disk of process 0 was full: process 1, whose connection broke before its watchdog looked, ended with 76."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    store.texts["tunix/failed/0"] = json.dumps({"code": code, "why": "the disk is full", "host": "a"})
    assert peers.blame(RuntimeError("Gloo: closed")) == (own, "process 0 (a) failed: the disk is full")


def test_the_error_of_a_broken_connection_is_no_bug(store, monkeypatch, capsys):
    """Another process was killed, and could not say so: a scheduler starts the run again. A bug has its traceback."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    lost = "another process died or cannot be reached: RuntimeError: Connection reset by peer"
    assert peers.blame(RuntimeError("Connection reset by peer")) == (76, lost)
    assert capsys.readouterr().err == ""
    assert peers.blame(KeyError("x")) == (1, "KeyError: 'x'")
    assert "KeyError: 'x'" in capsys.readouterr().err


def test_shares_of_all_processes_are_the_whole_in_order(monkeypatch):
    for count, size in ((3, 10), (4, 3), (2, 0), (1, 5)):
        monkeypatch.setattr(jax, "process_count", lambda count=count: count)
        shares = []
        for rank in range(count):
            monkeypatch.setattr(jax, "process_index", lambda rank=rank: rank)
            shares.append(peers.share(size))
        assert [each for share in shares for each in share] == [*range(size)]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(("rank", "turn"), [(0, 0), (1, 2), (2, 1), (3, 2)])
def test_one_process_of_each_host_works_before_the_others(rank, turn, monkeypatch):
    """They find what it leaves on the disk of their host; process 0 is before all, as hosts may share a disk."""
    monkeypatch.setattr(peers, "hosts", lambda: ["a", "a", "b", "b"])
    monkeypatch.setattr(peers.socket, "gethostname", lambda: "ab"[rank // 2])
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(jax, "process_index", lambda: rank)
    turns = []
    monkeypatch.setattr(peers, "together", lambda work, name: turns.append(work()))
    peers.main_first(lambda: "work", "making it")
    assert turns == ["work" if each == turn else None for each in range(3)]


@pytest.mark.parametrize(
    ("blind", "requested", "found"),
    [([], "auto", True), ([1, 2], "auto", False), ([2], "auto", "c"), ([1, 2], True, "b, c"), ([1, 2], False, False)],
)
def test_a_disk_is_shared_by_all_hosts_or_by_none(blind, requested, found, monkeypatch):
    """Where some hosts alone lack it, it is not mounted there."""
    monkeypatch.setattr(peers, "hosts", lambda: ["a", "b", "c"])
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(peers, "find_blind", lambda _: blind)
    if isinstance(found, bool):
        assert peers.is_seen_by_all(Path("runs"), requested, "the folder", "hydra.run.dir") is found
        return
    with pytest.raises(UserError, match=f"the folder runs is not seen by {found}; choose one .*: hydra.run.dir=DIR"):
        peers.is_seen_by_all(Path("runs"), requested, "the folder", "hydra.run.dir")
