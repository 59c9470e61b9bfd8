# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The box's side of the push: exactly once with the real sink under any order of troubles, and whom it trusts."""

from __future__ import annotations

import asyncio
import base64
import stat
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polling import eventually
from raw_model import RawModel, answer, self_signed
from sink_line import SinkLine, cut_sink
from test_collect import line

from boxstrap.controller.collect import Collector
from boxstrap.controller.errors import EvidenceError
from boxstrap.controller.inbox import Inbox
from boxstrap.controller.sink import Sink
from boxstrap.runner import push
from boxstrap.runner.layout import SessionPaths
from boxstrap.runner.push import Pusher
from boxstrap.runner.tail import read_slice
from boxstrap.runner.wire import Sink as Told
from boxstrap.runner.wire import Tail, to_json

STEPS = ("write", "take", "pull", "lose", "cut", "mend", "restart", "stale")
"""The box writes; the consumer takes a batch, or asks; an answer is lost; the line is cut, mended; the controller is started
anew, at another address; a batch that was under way for long arrives twice."""


class House:
    """A session's folder, its pusher, and whoever reads it at this moment."""

    def __init__(self, folder: Path) -> None:
        self.session = SessionPaths(str(folder / "box"))
        Path(self.session.path).mkdir()
        Path(self.session.evidence).touch()
        Path(self.session.claim).symlink_to("c" * 64)
        self.folder = folder
        self.seen: list[int] = []
        self.written = 0
        self.collector = self.reader()
        self.stale = ""

    def reader(self) -> Collector:
        """Collect as a controller that was just started does."""
        return Collector(self.folder / "out", lambda event: self.seen.append(event.seq))

    def write(self) -> None:
        """Write two events."""
        with Path(self.session.evidence).open("ab") as file:
            for _ in range(2):
                self.written += 1
                file.write(line(self.written))

    def end(self) -> None:
        """Take the session away: the pusher goes."""
        Path(self.session.claim).unlink()

    def pull(self) -> None:
        """Ask by offset."""
        start = self.collector.offset
        data, size = read_slice(self.session.evidence, start, torn=False)
        chunk = base64.b64encode(data).decode()
        self.stale = to_json(Tail(start=start, next=start + len(data), size=size, chunk=chunk, state="running", claim="c"))
        self.collector.feed(self.stale)

    async def take(self, inbox: Inbox, within_s: float) -> None:
        """Take a batch, if one comes."""
        text = await inbox.line(within_s=within_s)
        if text is None:
            return
        try:
            self.collector.feed(text)
        except EvidenceError as error:
            inbox.refuse(self.collector.offset, error.message)
        else:
            inbox.acknowledge(self.collector.offset)

    def tell(self, sink: Sink) -> Inbox:
        """Put a sink.json into the box."""
        inbox = sink.register()
        Path(self.session.sink).write_text(to_json(Told(url=inbox.url, token=inbox.token)))
        return inbox

    async def step(self, what: str, sink: Sink, inbox: Inbox, trouble: SinkLine) -> Inbox:
        """Do one thing."""
        if what == "write":
            self.write()
        elif what == "take":
            await self.take(inbox, 0.05)
        elif what == "pull":
            self.pull()
        elif what == "lose":
            trouble.lose(1)
        elif what == "cut":
            trouble.cut()
        elif what == "mend":
            trouble.mend()
        elif what == "stale" and self.stale:
            self.collector.feed(self.stale)
        elif what == "restart":
            self.collector.close()
            self.collector = self.reader()
            sink.unregister(inbox)
            inbox = self.tell(sink)
        await asyncio.sleep(0.005)  # lets the thread come to its turn; what it does then is any of the orders
        return inbox


@pytest.fixture(autouse=True, scope="module")
def hurried() -> Iterator[None]:
    """The same troubles in a tenth of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(push, "PUSH_BEAT_S", 0.05)
        patch.setattr(push, "PAUSES_S", (0.01, 0.02, 0.05))
        yield


def test_sink_behind_tls_is_checked_by_the_tasks_authorities_and_reached_without_its_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's certificate gets nothing, the token least of all."""
    context, cert = self_signed(tmp_path)
    for name in ("http_proxy", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    house = House(tmp_path)
    with RawModel(answer(b'{"v":1,"next":0}'), tls=context) as server:
        told = Told(url=f"https://localhost:{server.port}/evidence", token="t0ken")
        Path(house.session.sink).write_text(to_json(told))
        stranger = push.Pusher(house.session)
        eventually(lambda: stranger._failures > 2)
        assert server.requests == []
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        eventually(lambda: len(server.requests) > 2)
        house.end()
        stranger.finish(within_s=5)
    house.collector.close()
    assert stat.S_IMODE(Path(house.session.sink).stat().st_mode) == 0o600


@settings(deadline=None, max_examples=40)
@given(steps=st.lists(st.sampled_from(STEPS), min_size=3, max_size=25))
def test_each_event_is_delivered_once_whatever_is_lost_repeated_or_restarted(steps: list[str]) -> None:
    """And when the troubles end, the push alone brings the rest."""

    async def live(house: House) -> None:
        async with cut_sink() as (sink, trouble):
            inbox = house.tell(sink)
            pusher = Pusher(house.session)
            for what in steps:
                inbox = await house.step(what, sink, inbox, trouble)
            trouble.mend()
            trouble.losing = 0
            house.write()
            async with asyncio.timeout(20):
                while len(house.seen) < house.written:
                    await house.take(inbox, 0.2)
            house.end()
            await asyncio.to_thread(pusher.finish, within_s=5)

    with TemporaryDirectory() as folder:
        house = House(Path(folder))
        asyncio.run(live(house))
        house.collector.close()
        assert house.seen == list(range(1, house.written + 1))
        assert house.collector.gaps == []
        assert house.collector.path.read_bytes() == Path(house.session.evidence).read_bytes()
