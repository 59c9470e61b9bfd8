# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The collector against lost and repeated replies, torn and hostile lines, and restarts."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boxstrap.controller.collect import Collector, read_events
from boxstrap.controller.errors import EvidenceError
from boxstrap.runner.wire import EVIDENCE_LINE_MAX, Event, Kind, Tail, to_json


def line(seq: int, text: str = "x") -> bytes:
    """Write an event as the runner does."""
    return to_json(Event(seq=seq, t=1.0, mono=1.0, kind=Kind.LOG, data={"text": text})).encode() + b"\n"


def reply(start: int, data: bytes, size: int | None = None) -> str:
    """Answer as `tail` does."""
    end = start + len(data)
    chunk = base64.b64encode(data).decode()
    return to_json(Tail(start=start, next=end, size=end if size is None else size, chunk=chunk, state="running", claim="c"))


@pytest.fixture
def seen() -> list[int]:
    return []


@pytest.fixture
def collector(tmp_path: Path, seen: list[int]) -> Iterator[Collector]:
    collector = Collector(tmp_path, lambda event: seen.append(event.seq))
    yield collector
    collector.close()


def test_repeated_reply_delivers_nothing_twice(collector: Collector, seen: list[int]) -> None:
    data = line(1) + line(2)
    collector.feed(reply(0, data))
    collector.feed(reply(0, data + line(3)))
    assert seen == [1, 2, 3]
    assert collector.path.read_bytes() == data + line(3)


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (b'{"v":1}\n', "bad_line"),
        (b"\xff\xfe\n", "bad_line"),
        (b"\0\0\n", "bad_line"),
        (b'{"v":1,"seq":NaN,"t":1,"mono":1,"kind":"log","data":{}}\n', "bad_line"),
        (line(2).replace(b'"kind"', b'"extra":1,"kind"'), "bad_line"),
        (line(1), "repeated_seq"),
        (line(4), "missing_seq"),
        (b"[" * 100_000 + b"\n", "bad_line"),
        (b"x" * (EVIDENCE_LINE_MAX + 1) + b"\n", "line_too_long"),
    ],
)
def test_bad_line_becomes_a_gap_and_loses_nothing_else(collector: Collector, seen: list[int], bad: bytes, code: str) -> None:
    collector.feed(reply(0, line(1) + bad + line(5)))
    assert seen[0] == 1
    assert seen[-1] == 5
    assert code in {gap.code for gap in collector.gaps}
    assert collector.gaps[0].offset == len(line(1))


def test_endless_line_is_one_gap_in_bounded_memory(collector: Collector, seen: list[int]) -> None:
    collector.feed(reply(0, line(1)))
    for _ in range(50):
        collector.feed(reply(collector.offset, b"y" * 1_000_000))
        assert len(collector._rest) <= EVIDENCE_LINE_MAX
    collector.feed(reply(collector.offset, b"\n" + line(2)))
    assert (seen, [gap.code for gap in collector.gaps]) == ([1, 2], ["line_too_long"])


@pytest.mark.parametrize(
    "text", ["", "nonsense", "{}", '{"v":1}', reply(5, b"x"), reply(0, b"x").replace('"chunk":"', '"chunk":"!')]
)
def test_reply_that_is_none_is_refused_and_moves_nothing(collector: Collector, text: str) -> None:
    with pytest.raises(EvidenceError):
        collector.feed(text)
    assert collector.offset == 0


def test_torn_last_line_is_named(collector: Collector, seen: list[int]) -> None:
    collector.feed(reply(0, line(1) + line(2)[:-9]))
    collector.end(None)
    assert (seen, [(gap.code, gap.offset) for gap in collector.gaps]) == ([1], [("torn_line", len(line(1)))])


@settings(deadline=None, max_examples=150)
@given(
    texts=st.lists(st.text(max_size=30), min_size=1, max_size=15),
    cuts=st.lists(st.integers(0, 4000), max_size=12),
    again=st.lists(st.booleans(), min_size=13, max_size=13),
    restarts=st.sets(st.integers(0, 12)),
)
def test_each_event_arrives_once_however_it_is_cut_repeated_or_restarted(
    texts: list[str], cuts: list[int], again: list[bool], restarts: set[int]
) -> None:
    """Any cutting into replies, any reply lost and asked for again, a restart of the reader at any point."""
    whole = b"".join(line(seq, text) for seq, text in enumerate(texts, 1))
    edges = sorted({0, len(whole), *(cut % (len(whole) + 1) for cut in cuts)})
    seen: list[int] = []
    with TemporaryDirectory() as folder:
        collector = Collector(Path(folder), lambda event: seen.append(event.seq))
        for number, (start, end) in enumerate(pairwise(edges)):
            if number in restarts:
                collector.close()
                collector = Collector(Path(folder), lambda event: seen.append(event.seq))
            for _ in range(1 + again[number]):
                collector.feed(reply(start, whole[start:end]))
        collector.end(None)
        collector.close()
        assert collector.path.read_bytes() == whole
        assert [event.data["text"] for event in read_events(collector.path)] == [json.loads(json.dumps(text)) for text in texts]
    assert seen == list(range(1, len(texts) + 1))
    assert collector.gaps == []


@settings(deadline=None, max_examples=150)
@given(texts=st.lists(st.text(max_size=30), min_size=1, max_size=12), crash=st.integers(0, 4000), attach=st.booleans())
def test_writer_that_crashed_at_any_byte_costs_the_torn_line_and_says_so(texts: list[str], crash: int, *, attach: bool) -> None:
    """What was finished arrives; what was torn is one gap; a reader that attaches later takes the rest if it comes."""
    whole = b"".join(line(seq, text) for seq, text in enumerate(texts, 1))
    crash %= len(whole) + 1
    seen: list[int] = []
    with TemporaryDirectory() as folder:
        collector = Collector(Path(folder), lambda event: seen.append(event.seq))
        if crash:
            collector.feed(reply(0, whole[:crash]))
        collector.end(None)
        collector.close()
        torn = [] if whole[:crash].endswith(b"\n") or not crash else ["torn_line"]
        assert [gap.code for gap in collector.gaps] == torn
        assert seen == list(range(1, whole[:crash].count(b"\n") + 1))
        if attach and crash < len(whole):
            collector = Collector(Path(folder), lambda event: seen.append(event.seq))
            collector.feed(reply(crash, whole[crash:]))
            collector.end(None)
            collector.close()
            assert (seen, collector.gaps) == (list(range(1, len(texts) + 1)), [])


def test_copy_of_the_whole_file_is_taken_up_where_the_reader_stood(
    collector: Collector, seen: list[int], tmp_path: Path
) -> None:
    """Salvage from a dead box's disk; a copy that begins differently is refused and moves nothing."""
    copy = tmp_path / "copy"
    collector.feed(reply(0, line(1)))
    copy.write_bytes(line(1) + line(2) + line(3))
    collector.feed_file(copy)
    assert seen == [1, 2, 3]
    copy.write_bytes(line(9) + line(2) + line(3) + line(4))
    with pytest.raises(EvidenceError, match="begin"):
        collector.feed_file(copy)
    assert seen == [1, 2, 3]


def test_letters_that_are_no_base64_are_a_bad_reply(collector: Collector) -> None:
    """Found by the fuzz: base64 refuses a letter beyond ASCII with an error of its own."""
    with pytest.raises(EvidenceError):
        collector.feed(reply(0, b"x").replace('"chunk":"', '"chunk":"\u00e9'))
