# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The sink against whoever reaches it, which is every box and what runs there: bounded, and each session for itself."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from test_collect import line, reply

from boxstrap.controller import inbox as inbox_module
from boxstrap.controller import listening as listening_module
from boxstrap.controller import sink as sink_module
from boxstrap.controller.collect import Collector
from boxstrap.controller.errors import EvidenceError, UsageError
from boxstrap.controller.inbox import Inbox
from boxstrap.controller.listening import listening
from boxstrap.controller.sink import BODY_MAX, Sink
from boxstrap.runner.wire import Acknowledged, to_json


@pytest.fixture
async def sink() -> AsyncIterator[Sink]:
    """A sink that listens."""
    async with listening("http://127.0.0.1:0") as sink:
        yield sink


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=20, trust_env=False) as client:
        yield client


@pytest.fixture
def seen() -> list[int]:
    return []


@pytest.fixture
def collector(tmp_path: Path, seen: list[int]) -> Iterator[Collector]:
    collector = Collector(tmp_path, lambda event: seen.append(event.seq))
    yield collector
    collector.close()


def post(client: httpx.AsyncClient, inbox: Inbox, body: Any) -> asyncio.Task[httpx.Response]:
    """Push as a box does."""
    headers = {"Authorization": f"Bearer {inbox.token}"}
    return asyncio.ensure_future(client.post(inbox.url, content=body, headers=headers))


async def take(inbox: Inbox, collector: Collector) -> None:
    """Consume one batch as the session does."""
    text = await inbox.line(within_s=5)
    assert text is not None
    try:
        collector.feed(text)
    except EvidenceError as error:
        inbox.refuse(collector.offset, error.message)
    else:
        inbox.acknowledge(collector.offset)


async def pushed(client: httpx.AsyncClient, inbox: Inbox, collector: Collector, body: Any) -> tuple[int, int]:
    """Push one batch and take it; give the status, and from where the box is to go on."""
    asked = post(client, inbox, body)
    await take(inbox, collector)
    answer = await asked
    return answer.status_code, answer.json()["next"]


async def test_batch_is_acknowledged_when_it_was_taken(
    sink: Sink, client: httpx.AsyncClient, collector: Collector, seen: list[int]
) -> None:
    """Not before; and repeated, overlapping and early batches deliver nothing twice and lose nothing."""
    inbox = sink.register()
    asked = post(client, inbox, reply(0, line(1)))
    assert await inbox.line(within_s=5) == reply(0, line(1))
    await asyncio.wait({asked}, timeout=0.2)
    assert not asked.done()
    await take(inbox, collector)
    end = len(line(1))
    assert (await asked).json() == {"v": 1, "next": end, "error": ""}
    assert await pushed(client, inbox, collector, reply(0, line(1))) == (200, end)
    assert await pushed(client, inbox, collector, reply(0, line(1) + line(2))) == (200, 2 * end)
    assert await pushed(client, inbox, collector, reply(5 * end, line(6))) == (422, 2 * end)
    assert await pushed(client, inbox, collector, reply(2 * end, line(3))) == (200, 3 * end)
    assert seen == [1, 2, 3]


async def test_answer_does_not_wait_for_the_network(sink: Sink, client: httpx.AsyncClient, collector: Collector) -> None:
    """A reply of two small pieces used to wait 40 ms for the box to acknowledge the first."""
    inbox = sink.register()
    took = []
    for _ in range(10):
        begun = time.monotonic()
        await pushed(client, inbox, collector, reply(0, line(1)))
        took.append(time.monotonic() - begun)
    assert min(took) < 0.03


@pytest.mark.parametrize(
    ("method", "path", "token", "status"),
    [
        ("POST", "/evidence", "", 401),
        ("POST", "/evidence", "Bearer ", 401),
        ("POST", "/evidence", "Bearer wrong", 401),
        ("POST", "/evidence", "Bearer old", 401),
        ("POST", "/evidence", "Basic good", 401),
        ("GET", "/evidence", "Bearer good", 405),
        ("PUT", "/evidence", "Bearer good", 405),
        ("POST", "/", "Bearer good", 404),
        ("POST", "/evidence/x", "Bearer good", 404),
        ("POST", "/../evidence", "Bearer good", 404),
    ],
)
async def test_stranger_is_told_so_in_a_sentence_and_his_body_is_not_read(
    sink: Sink, method: str, path: str, token: str, status: int
) -> None:
    """The answer comes although the body never does."""
    good, old = sink.register(), sink.register()
    sink.unregister(old)
    token = token.replace("good", good.token).replace("old", old.token)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(sink.url.rpartition(":")[2]))
    authorization = f"Authorization: {token}\r\n" if token else ""
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\n{authorization}Content-Length: 1000\r\n\r\n".encode())
    answer = (await asyncio.wait_for(reader.readuntil(b"}"), 5)).decode()
    writer.close()
    assert answer.split()[1] == str(status)
    assert answer.partition('"error":"')[2].endswith('."}')
    assert await good.line(within_s=0) is None


async def test_token_of_another_session_reaches_that_one_only(sink: Sink, client: httpx.AsyncClient) -> None:
    mine, other = sink.register(), sink.register()
    asked = post(client, other, reply(0, line(1)))
    assert await other.line(within_s=5) is not None
    assert await mine.line(within_s=0.2) is None
    other.acknowledge(0)
    await asked


@pytest.mark.parametrize("declared", [True, False])
async def test_body_beyond_the_bound_is_refused_unread(sink: Sink, *, declared: bool) -> None:
    """By what it says of itself, or as soon as it passes the bound: it has no end, and the answer comes."""
    inbox = sink.register()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(sink.url.rpartition(":")[2]))
    length = f"Content-Length: {BODY_MAX + 1}" if declared else "Transfer-Encoding: chunked"
    writer.write(f"POST /evidence HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {inbox.token}\r\n{length}\r\n\r\n".encode())

    async def flood() -> None:
        while True:
            writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await writer.drain()

    flooding = asyncio.ensure_future(flood() if not declared else asyncio.sleep(60))
    answer = await asyncio.wait_for(reader.readuntil(b"}"), 20)
    flooding.cancel()
    await asyncio.gather(flooding, return_exceptions=True)
    writer.close()
    assert answer.split()[1] == b"413"


@pytest.mark.parametrize(
    "body",
    [b"", b"\x00\xff\xfe", b"null", b"{}", b"[" * 500_000, b'{"a":' * 200_000, reply(0, b"x").encode()[:-9], b"1" * 99999],
)
async def test_nonsense_moves_nothing_and_the_next_batch_is_taken(
    sink: Sink, client: httpx.AsyncClient, collector: Collector, body: bytes
) -> None:
    inbox = sink.register()
    assert await pushed(client, inbox, collector, body) == (422, 0)
    assert await pushed(client, inbox, collector, reply(0, line(1))) == (200, len(line(1)))


async def test_slow_body_is_given_up(sink: Sink, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module, "BODY_S", 0.3)

    async def slowly() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(1)
        yield b"}"

    assert (await post(client, sink.register(), slowly())).status_code == 408


async def test_second_batch_is_refused_while_one_waits(sink: Sink, client: httpx.AsyncClient, collector: Collector) -> None:
    """The box holds what it has: that is the back-pressure."""
    inbox = sink.register()
    first = post(client, inbox, reply(0, line(1)))
    assert await inbox.line(within_s=5) is not None
    for _ in range(20):
        assert (await post(client, inbox, reply(0, line(1) + line(2)))).status_code == 409
    await take(inbox, collector)
    assert (await first).status_code == 200
    assert collector.events == 1


async def test_batch_that_nobody_takes_is_to_come_again(
    sink: Sink, client: httpx.AsyncClient, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox_module, "HOLD_S", 0.2)
    inbox = sink.register()
    answer = await post(client, inbox, reply(0, line(1)))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    monkeypatch.setattr(inbox_module, "HOLD_S", 5.0)
    assert await pushed(client, inbox, collector, reply(0, line(1))) == (200, len(line(1)))


@pytest.mark.parametrize("waiting", [True, False])
async def test_box_that_hangs_up_is_silent_at_once(sink: Sink, collector: Collector, *, waiting: bool) -> None:
    """While its batch waits, and between two: whoever waits for it goes on to ask."""
    inbox = sink.register()
    async with httpx.AsyncClient(trust_env=False) as client:
        asked = post(client, inbox, reply(0, line(1)))
        if waiting:
            assert await inbox.line(within_s=5) is not None
            asked.cancel()
        else:
            await take(inbox, collector)
            await asked
            assert inbox.patience_s > 1
    async with asyncio.timeout(2):
        while inbox.patience_s:
            await inbox.line(within_s=inbox.patience_s)
            await asyncio.sleep(0)
    await asyncio.gather(asked, return_exceptions=True)


async def test_closed_session_is_closed_for_the_batch_that_waits_too(sink: Sink, client: httpx.AsyncClient) -> None:
    inbox = sink.register()
    asked = post(client, inbox, reply(0, line(1)))
    assert await inbox.line(within_s=5) is not None
    sink.unregister(inbox)
    assert (await asked).status_code == 401
    assert (await post(client, inbox, reply(0, line(1)))).status_code == 401


@pytest.mark.parametrize(
    ("root_path", "path"), [("", "/boxstrap/evidence"), ("/boxstrap", "/boxstrap/evidence"), ("/any", "/evidence")]
)
async def test_mounted_sink_is_found_below_its_mount(root_path: str, path: str) -> None:
    """As the frameworks call what they mount: with the whole path, or with what is left of it."""
    sink = Sink("http://agents.example:8000/boxstrap/")
    inbox = sink.register()
    assert inbox.url == "http://agents.example:8000/boxstrap/evidence"
    said: list[Any] = []
    messages = iter([{"type": "http.request", "body": reply(0, b"").encode(), "more_body": False}])

    async def receive() -> Any:
        try:
            return next(messages)
        except StopIteration:
            return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        said.append(message)

    headers = [(b"authorization", f"Bearer {inbox.token}".encode())]
    scope = {"type": "http", "method": "POST", "path": path, "root_path": root_path, "headers": headers, "client": None}
    call = asyncio.ensure_future(sink(scope, receive, send))
    assert await inbox.line(within_s=5) is not None
    inbox.acknowledge(7)
    await call
    assert (said[0]["status"], said[1]["body"].decode()) == (200, to_json(Acknowledged(next=7)))


async def test_starlette_mounts_it_as_it_is(collector: Collector) -> None:
    """And with it FastAPI, which mounts by Starlette's own."""
    sink = Sink("http://agents.example:8000/boxstrap")
    inbox = sink.register()
    app = Starlette(routes=[Mount("/boxstrap", app=sink)])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        assert await pushed(client, inbox, collector, reply(0, line(1))) == (200, collector.offset)
        assert (await client.get(inbox.url)).status_code == 405
        assert (await client.post(inbox.url + "/more")).status_code == 404


async def test_other_event_loop_is_refused(sink: Sink) -> None:
    """A future must not be set from another thread: better a sentence than a batch that hangs."""
    inbox = sink.register()
    said: list[Any] = []

    async def send(message: Any) -> None:
        said.append(message)

    async def elsewhere() -> None:
        headers = [(b"authorization", f"Bearer {inbox.token}".encode())]
        await sink({"type": "http", "method": "POST", "path": "/evidence", "headers": headers}, None, send)  # type: ignore[arg-type]

    await asyncio.to_thread(asyncio.run, elsewhere())
    assert said[0]["status"] == 500


async def test_silent_connections_are_let_go_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any box can open connections: they take neither all of this process's files nor a place for ever."""
    monkeypatch.setattr(listening_module, "CONNECTIONS_MAX", 5)
    monkeypatch.setattr(listening_module, "HEAD_S", 0.5)
    async with listening("http://127.0.0.1:0") as sink:
        talks = [await asyncio.open_connection("127.0.0.1", int(sink.url.rpartition(":")[2])) for _ in range(8)]
        ends = [asyncio.ensure_future(reader.read()) for reader, _ in talks]
        await asyncio.wait(ends, timeout=0.2)
        assert sum(end.done() for end in ends) == 3
        await asyncio.wait_for(asyncio.gather(*ends, return_exceptions=True), 5)
        for _, writer in talks:
            writer.close()


async def test_listening_leaves_the_process_as_it_was() -> None:
    """Signals and logging are the caller's."""
    names = ("uvicorn", "uvicorn.error", "uvicorn.access")

    def look() -> list[Any]:
        loggers = [logging.getLogger(name) for name in names]
        return [
            [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
            [(one.level, list(one.handlers), one.propagate, one.disabled) for one in loggers],
        ]

    before = look()
    async with listening("http://127.0.0.1:0"):
        assert look() == before
    assert look() == before


@pytest.mark.parametrize(
    ("url", "word"),
    [("https://here:1", "certificate"), ("ftp://here", "http://"), ("http://", "HOST"), ("http://127.0.0.1:99999", "port")],
)
async def test_url_that_cannot_be_served_is_refused(url: str, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        async with listening(url):
            pass


async def test_port_that_is_taken_is_named(sink: Sink) -> None:
    with pytest.raises(UsageError, match="could not be served"):
        async with listening(sink.url):
            pass
