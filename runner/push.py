# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Pushes a session's evidence to a sink of the controller: what `tail` answers, by HTTP POST, one batch at a time.

A thread of the watchdog, so that there is no process more to account for. It only makes things fast: what does not arrive is
there by offset for whoever asks. Where sink.json is found when the session starts, it is read again whenever nobody answers: a
controller that was restarted writes another. It refuses to hold up or to end the watchdog, and to use the task's proxies.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
from urllib.parse import urlsplit

from boxstrap.runner import receipts
from boxstrap.runner.layout import SessionPaths
from boxstrap.runner.tail import tail
from boxstrap.runner.wire import PUSH_BEAT_S, SINK_MAX, VERSION, Sink, Tail, to_json

CONNECT_S = 5.0
ANSWER_S = 45.0
"""How long a sink may take for its answer: it holds it until the batch was taken, for some 30 s."""
PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0)
"""Between tries while the sink is not there."""
CLAIM_EVERY_S = 0.05
END_TRIES = 3
"""How often the last batch is sent before the pull has to do."""
_ANSWER_MAX = 4096
_OFFSET_MAX = 2**53
_TAKEN, _REWOUND, _UNKNOWN = 200, 422, 401


class Pusher:
    """The thread. It ends by itself when the last batch was acknowledged, or the session's folder is gone."""

    def __init__(self, session: SessionPaths) -> None:
        self._session = session
        self._judged = threading.Event()
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="boxstrap-push", daemon=True)
        self._thread.start()

    def finish(self, *, within_s: float) -> None:
        """Wait until the last batch was delivered, unless the sink is long away: nothing of the session happens any more."""
        self._judged.set()
        self._thread.join(within_s if self._failures < END_TRIES else 0)

    def _run(self) -> None:
        try:
            # Its request may be waited for: whereto to push comes with that. It may have come, and all be over, in between.
            while not receipts.claim_of(self._session) and not self._judged.wait(CLAIM_EVERY_S):
                if not os.path.isdir(self._session.path):
                    return
            if os.path.lexists(self._session.sink):
                self._push()
        except Exception:  # noqa: BLE001
            # Broad on purpose: the controller pulls what this does not push, and the watchdog's stderr may be a person's.
            return

    def _push(self) -> None:
        start = 0
        refused: Sink | None = None
        link: _Link | None = None
        while not self._judged.is_set() or self._failures < END_TRIES:
            sink = read_sink(self._session) if link is None else link.sink
            try:
                if sink is None or sink == refused:
                    raise ConnectionError("nobody is there to push to")
                link = link or _Link(sink)
                link.connect()
                told = tail(self._session, start=start, wait_s=PUSH_BEAT_S)
                if told.state == "absent":
                    return
                status, start = link.post(told, start)
                if status != _TAKEN:
                    refused = sink if status == _UNKNOWN else None
                    raise ConnectionError(f"the sink answered {status}")
            except (OSError, http.client.HTTPException, ValueError):
                if link is not None:
                    link.close()
                link = None
                self._judged.wait(PAUSES_S[min(self._failures, len(PAUSES_S) - 1)])
                self._failures += 1
                continue
            self._failures = 0
            if told.state in {"ended", "lost"} and start >= told.size:
                return


class _Link:
    """One kept connection to a sink."""

    def __init__(self, sink: Sink) -> None:
        parts = urlsplit(sink.url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"found sink {sink.url!r}, needed http://host or https://host")
        self.sink = sink
        self._path = parts.path or "/"
        if parts.scheme == "https":
            from boxstrap.runner import authorities  # noqa: PLC0415 (most sinks are plain ones)

            context = authorities.tls()
            self._http: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=CONNECT_S, context=context
            )
        else:
            self._http = http.client.HTTPConnection(parts.hostname, parts.port, timeout=CONNECT_S)

    def connect(self) -> None:
        """Connect, unless it is."""
        if not self._open():
            self._http.connect()
            self._http.sock.settimeout(ANSWER_S)

    def post(self, told: Tail, start: int) -> tuple[int, int]:
        """Send one batch; return the answer's status, and the byte from which the sink wants more (`start` if it says none).

        Raises:
            OSError, HTTPException, ValueError: no answer came, or it makes no sense.
        """
        headers = {"Authorization": f"Bearer {self.sink.token}", "Content-Type": "application/json"}
        self._http.request("POST", self._path, body=to_json(told).encode("ascii"), headers=headers)
        answer = self._http.getresponse()
        body = answer.read(_ANSWER_MAX)
        if answer.status in {_TAKEN, _REWOUND}:
            return answer.status, _next(body)
        return answer.status, start

    def _open(self) -> bool:
        return self._http.sock is not None

    def close(self) -> None:
        """Let go of the connection."""
        self._http.close()


def read_sink(session: SessionPaths) -> Sink | None:
    """Read sink.json, and keep it from others; None where there is none that can be read."""
    try:
        fd = os.open(session.sink, receipts.READ_FLAGS)
        try:
            os.fchmod(fd, 0o600)
        finally:
            os.close(fd)
        plain = json.loads(receipts.read_file(session.sink, SINK_MAX))
        sink = Sink(**plain)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return sink if sink.v == VERSION and isinstance(sink.url, str) and isinstance(sink.token, str) else None


def _next(body: bytes) -> int:
    try:
        plain = json.loads(body)
    except RecursionError as error:
        raise ValueError("the sink's answer is nested too deep") from error
    found = plain.get("next") if isinstance(plain, dict) and plain.get("v") == VERSION else None
    if type(found) is not int or not 0 <= found < _OFFSET_MAX:
        raise ValueError(f"found {body[:100]!r}, needed an offset")
    return found
