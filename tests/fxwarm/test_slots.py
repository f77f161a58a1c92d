"""Compiles of all families and graphs of a process share its slots."""

from __future__ import annotations

import threading

from fxwarm import slots


def test_families_together_keep_to_the_jobs_of_one():
    running, most, lock = 0, 0, threading.Lock()
    gate = threading.Event()

    def compile_one():
        nonlocal running, most
        with slots.take(3):
            with lock:
                running += 1
                most = max(most, running)
            gate.wait(5)
            with lock:
                running -= 1

    threads = [threading.Thread(target=compile_one) for _ in range(8)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join()
    assert 1 <= most <= 3


def test_who_wants_more_than_there_is_waits_for_all():
    with slots.take(2, 5):
        waiting = threading.Event()

        def other():
            with slots.take(2):
                waiting.set()

        thread = threading.Thread(target=other)
        thread.start()
        assert not waiting.wait(0.05)
    thread.join()
    assert waiting.is_set()


def test_a_failed_compile_gives_its_slot_back():
    for _ in range(3):
        try:
            with slots.take(1):
                raise ValueError
        except ValueError:
            pass
    with slots.take(1):
        pass
