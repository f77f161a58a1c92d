"""Exchanges of small records between the ranks of a group, in which nobody waits for the dead.

They go through the group's own ``torch.distributed`` store, not through its collectives: a wait here does not count
against the group's timeout, opens nothing on a device, and says whom it waits for. Each exchange ends with one verdict,
set once in the store, on who took part, so that all ranks go on with the same data.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist

log = logging.getLogger(__name__)

T = TypeVar("T")

BEAT = 0.5
"""Seconds between two signs of life of a rank."""
SILENCE = 15.0
"""Seconds without a sign of life after which a rank counts as dead: 30 beats, for a machine where nothing gets a turn."""
ARRIVAL = 1800.0
"""Seconds to wait for a rank that has not come yet: as long as torch's own default, but with a line every few seconds."""
SAY_AFTER = 5.0
"""Seconds between two lines that say whom we wait for."""
_POLL = 0.02
_LEFT = "left with"

_meetings: dict[str, int] = {}
"""How many meetings each group of this process has had: every rank counts alike, as for any collective."""
_lost: dict[str, dict[int, str]] = {}
"""Who went missing in an earlier meeting of a group: nobody waits for them again."""


class Meeting:
    """The ranks of ``group`` for as long as they have something to agree on. Use it in ``with``.

    Every rank makes the same exchanges in the same order. ``lost`` says who went missing, and why.
    """

    def __init__(self, group: Any) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.host = socket.gethostname()
        self.doing = "starting"
        """What the others read while they wait for this rank."""
        name = group.group_name
        self.lost = _lost.setdefault(name, {})
        self._members = set(range(self.size)) - self.lost.keys()
        self._begin = time.monotonic()
        self._seen: dict[int, tuple[str, float]] = {}
        self._step = 0
        self._stop = threading.Event()
        _meetings[name] = _meetings.get(name, 0) + 1
        prefix = f"fxwarm/{_meetings[name]}"
        store = dist.distributed_c10d._get_process_group_store(group)
        self._store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        # A client serves one thread at a time, and a sign of life must not queue behind anything.
        self._pulse = dist.PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]

    def __enter__(self) -> Meeting:
        self._thread = threading.Thread(target=self._beat, name="fxwarm-beat", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(2 * BEAT)
        if error is not None and not self.lost.keys() >= set(range(self.size)) - {self.rank}:
            self.doing = f"{_LEFT} {type(error).__name__}: {error}"
            with contextlib.suppress(Exception):  # then they find out by our silence
                self._store.set(f"beat/{self.rank}", self._sign("last"))

    def exchange(self, value: T) -> dict[int, T]:
        """Return what each rank that is still there gave to this exchange, by rank, in the order of the ranks.

        Waits for slow ranks, not for dead ones. Never raises for another rank's sake: where the store is gone, every
        other rank is lost and the answer is this rank's own.
        """
        self._step += 1
        if self._members == {self.rank}:
            return {self.rank: value}
        try:
            return self._exchange(value)
        except Exception as error:  # the store's process died, or its network did
            self._alone(
                f"the group's store does not answer ({type(error).__name__}: {str(error).splitlines()[0]})"
            )
            return {self.rank: value}

    def _exchange(self, value: T) -> dict[int, T]:
        step = f"step{self._step}"
        self._store.set(f"{step}/{self.rank}", msgspec.json.encode(value).decode())
        for rank, why in self._verdict(step):
            self._lose(rank, why)
        if (
            self.rank in self.lost
        ):  # this process was stopped for so long that the others gave it up
            self._alone(f"the others went on without this rank: it was {self.lost.pop(self.rank)}")
            return {self.rank: value}
        found = {
            rank: msgspec.json.decode(self._store.get(f"{step}/{rank}"), type=type(value))
            for rank in sorted(self._members)
        }
        if self._step > 1:  # all have come this far, so nobody reads the last one any more
            self._store.delete_key(f"step{self._step - 1}/{self.rank}")
        return found

    def _verdict(self, step: str) -> list[tuple[int, str]]:
        """Wait until all are there or given up; return who is given up. The first rank to decide decides for all."""
        waiting, said = self._members - {self.rank}, time.monotonic()
        while not self._store.check([f"{step}/verdict"]):
            waiting = {rank for rank in waiting if not self._store.check([f"{step}/{rank}"])}
            gone = [(rank, why) for rank in sorted(waiting) if (why := self._silent(rank))]
            if len(gone) == len(waiting):
                self._store.compare_set(f"{step}/verdict", "", msgspec.json.encode(gone).decode())
                break
            if time.monotonic() - said > SAY_AFTER:
                said = time.monotonic()
                words = "; ".join(self._describe(rank) for rank in sorted(waiting))
                log.warning("fxwarm: rank %d waits for %s", self.rank, words)
            time.sleep(_POLL)
        return msgspec.json.decode(self._store.get(f"{step}/verdict"), type=list[tuple[int, str]])

    def _silent(self, rank: int) -> str:
        """Return why ``rank`` is to be given up, or ""."""
        now, name = time.monotonic(), f"beat/{rank}"
        if rank not in self._seen and not self._store.check([name]):
            absent = now - self._begin
            return (
                f"absent: it did not come to fxwarm.warm_all within {absent:.0f} s"
                if absent > ARRIVAL
                else ""
            )
        beat = self._store.get(name).decode()
        last, when = self._seen.get(rank, ("", now))
        if beat != last:
            self._seen[rank] = (beat, now)
            left = beat.split("|", 2)[2].startswith(_LEFT)
            return f"gone {self._last_words(rank)}" if left else ""
        return (
            f"silent for {now - when:.0f} s {self._last_words(rank)}"
            if now - when > SILENCE
            else ""
        )

    def _describe(self, rank: int) -> str:
        if rank not in self._seen:
            return f"rank {rank}, which has not come yet ({time.monotonic() - self._begin:.0f} s)"
        return f"rank {rank} {self._last_words(rank)}"

    def _last_words(self, rank: int) -> str:
        _, host, doing = self._seen[rank][0].split("|", 2)
        return f"on {host} ({doing})"

    def _lose(self, rank: int, why: str) -> None:
        self.lost[rank] = why
        self._members.discard(rank)
        if rank != self.rank:
            log.error("fxwarm: going on without rank %d: %s", rank, why)

    def _alone(self, why: str) -> None:
        log.error("fxwarm: rank %d goes on alone: %s", self.rank, why)
        self.lost.update({rank: why for rank in self._members if rank != self.rank})
        self._members = {self.rank}

    def _sign(self, count: str) -> str:
        return f"{count}|{self.host} pid {os.getpid()}|{self.doing}"

    def _beat(self) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1
            try:
                self._pulse.set(f"beat/{self.rank}", self._sign(str(count)))
            except Exception as error:  # the exchange meets it too, and says so
                log.debug("fxwarm: no sign of life could be given: %s", error)
                return
            self._stop.wait(BEAT)
