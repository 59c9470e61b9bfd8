# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The model gateway as a process: bytes in, bytes out, one event a call. Models are bare sockets: nothing is forgiven."""

from __future__ import annotations

import gzip
import json
import random
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_session import GatewaySession
from polling import eventually
from raw_model import RawModel, answer, chunked, self_signed

from boxstrap.runner.cache_control import without_cache_control
from boxstrap.runner.wire import Model

RESPONSE = {"id": "r1", "status": "completed", "output": [], "usage": {"input_tokens": 7, "output_tokens": 2}}
OK = answer(json.dumps(RESPONSE).encode())
Open = Callable[..., GatewaySession]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Open]:
    """Starts gateways: `gateway(model_server, path="/v1", …fields of Model, max_calls=…, env=…)`."""
    opened: list[GatewaySession] = []

    def start(server: RawModel, *, path: str = "/v1", scheme: str = "http", **more: Any) -> GatewaySession:
        how = {name: more.pop(name) for name in ("max_calls", "env") if name in more}
        model = Model(url=f"{scheme}://localhost:{server.port}{path}", name="m", timeout_s=10.0)
        opened.append(GatewaySession(replace(model, **more), tmp_path, **how))
        return opened[-1]

    yield start
    for session in opened:
        session.__exit__(None, None, None)


def posted(session: GatewaySession, body: bytes, *, path: str = "/responses", **headers: str) -> httpx.Response:
    """POST a body through the gateway."""
    with httpx.Client(timeout=20, trust_env=False) as client:
        return client.post(session.url + path, content=body, headers={"content-type": "application/json", **headers})


def test_bytes_pass_as_they_are(gateway: Open) -> None:
    """Strange but legal JSON goes out and comes back without one byte changed; so do path prefix and query."""
    body = (
        '{ "model" : "m",\t"input":"é \\u00e9 \\ud83d", "n":1.0e5 ,"n":2, "big":123456789012345678901234567890 }\r\n'.encode()
    )
    reply = b'{"id" :"r",  "output":[ ], "status":"completed","usage":{"input_tokens":1e999}}  '
    with RawModel(answer(reply, head=["X-Own: a", "Request-Id: 7"])) as model:
        session = gateway(model, path="/ng-rollout/key/v1")
        got = posted(session, body, path="/responses?beta=true")
        assert (got.content, got.status_code, got.headers["x-own"], got.headers["request-id"]) == (reply, 200, "a", "7")
        assert model.bodies() == [body]
        assert model.targets() == ["POST /ng-rollout/key/v1/responses?beta=true"]


def test_stream_passes_as_it_comes(gateway: Open) -> None:
    """Each event reaches the agent before the next one is written; the bytes are the same."""
    events = [
        b"event: response.created\ndata: {}\n\n",
        b": comment\r\n\r\n",
        b'data: {"type":"resp',
        b'onse.completed","response":',
    ]
    events += [json.dumps(RESPONSE).encode() + b"}\n\n"]
    with RawModel(chunked(events), pause_s=0.15) as model, httpx.Client(timeout=20, trust_env=False) as client:
        session = gateway(model)
        body = b'{"model":"m","stream":true}'
        came: list[tuple[float, bytes]] = []
        with client.stream("POST", session.url + "/responses", content=body) as got:
            assert got.headers["content-type"] == "text/event-stream"
            came += [(time.monotonic(), piece) for piece in got.iter_raw()]
        assert b"".join(piece for _, piece in came) == b"".join(events)
        assert came[0][0] < model.written[2]
        eventually(lambda: session.calls)
        call = session.calls[0]
    assert (call["streaming"], call["finish_reason"], call["usage"]["input_tokens"], call["error"]) == (
        True,
        "completed",
        7,
        None,
    )
    assert call["ttfb_seconds"] < call["seconds"]
    assert call["response"] == RESPONSE


def test_headers_of_one_connection_stay_on_it(gateway: Open) -> None:
    """Hop-by-hop headers, and those that Connection names, go no further in either direction."""
    head = ["Connection: keep-alive, X-Hop", "X-Hop: 1", "Keep-Alive: timeout=5", "X-End: 2"]
    with RawModel(answer(json.dumps(RESPONSE).encode(), head=head)) as model:
        session = gateway(model)
        sent = {"connection": "x-mine", "x-mine": "1", "te": "trailers", "x-kept": "2", "proxy-authorization": "no"}
        got = posted(session, b"{}", **sent)
        seen = model.heads()[0]
        assert "x-mine" not in seen
        assert "te" not in seen
        assert "proxy-authorization" not in seen
        assert (seen["x-kept"], seen["host"]) == ("2", f"localhost:{model.port}")
        assert got.headers["x-end"] == "2"
        assert not {"x-hop", "keep-alive"} & set(got.headers)


def test_session_headers_win_and_cookies_have_a_jar_of_their_own(gateway: Open) -> None:
    """The agent sees no cookie of the model, and the model sees none of the agent; the session's headers are added."""
    cookies = answer(json.dumps(RESPONSE).encode(), head=["Set-Cookie: a=1; Path=/; HttpOnly", "Set-Cookie: b=2"])
    gone = answer(json.dumps(RESPONSE).encode(), head=["Set-Cookie: a=; Max-Age=0"])
    with RawModel(cookies, gone, OK) as model:
        session = gateway(model, headers={"Authorization": "Bearer real", "X-Session-Id": "s-1"})
        replies = [posted(session, b'{"n":%d}' % n, authorization="Bearer none", cookie="mine=1") for n in range(3)]
        assert [head.get("cookie") for head in model.heads()] == [None, "a=1; b=2", "b=2"]
        assert {(head["authorization"], head["x-session-id"]) for head in model.heads()} == {("Bearer real", "s-1")}
        assert not any("set-cookie" in reply.headers for reply in replies)


USAGE = [
    (
        "chat/completions",
        {"choices": [{"message": {}, "finish_reason": "stop"}]}
        | {"usage": {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}}
        | {"id": "c"},
        (9, 4, 0, 5, "stop"),
    ),
    (
        "responses",
        {**RESPONSE, "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        | {"usage": {"input_tokens": 9, "output_tokens": 4, "output_tokens_details": {"reasoning_tokens": 3}}},
        (9, 4, 3, 0, "max_output_tokens"),
    ),
    (
        "messages",
        {"content": [], "stop_reason": "end_turn"}
        | {"usage": {"input_tokens": 2, "cache_read_input_tokens": 6, "cache_creation_input_tokens": 1, "output_tokens": 4}},
        (9, 4, 0, 6, "end_turn"),
    ),
]


@pytest.mark.parametrize(("path", "reply", "told"), USAGE)
def test_usage_is_told_in_one_way_for_every_dialect(
    gateway: Open, path: str, reply: dict[str, Any], told: tuple[Any, ...]
) -> None:
    """Tokens and finish reason come from the body, whichever dialect it is in."""
    with RawModel(answer(json.dumps(reply).encode())) as model:
        session = gateway(model)
        posted(session, b'{"model":"m"}', path=f"/{path}")
        eventually(lambda: session.calls)
        call = session.calls[0]
    usage = call["usage"]
    names = ("input_tokens", "output_tokens", "reasoning_tokens", "cached_tokens")
    assert (*(usage[name] for name in names), call["finish_reason"]) == told
    assert (call["response"], call["request"]) == (reply, {"model": "m"})


STREAMS = [
    (
        "chat/completions",
        [{"choices": [{"delta": {}, "finish_reason": "stop"}]}, {"choices": [], "usage": {"prompt_tokens": 9}}],
        "stop",
    ),
    (
        "messages",
        [
            {"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 1}}},
            {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 4}},
            {"type": "message_stop"},
        ],
        "tool_use",
    ),
]


@pytest.mark.parametrize(("path", "events", "finish"), STREAMS)
def test_usage_is_found_in_every_stream(gateway: Open, path: str, events: list[Any], finish: str) -> None:
    """The last word of a stream counts."""
    with RawModel(chunked([f"data: {json.dumps(event)}\n\n".encode() for event in events])) as model:
        session = gateway(model)
        posted(session, b'{"stream":true}', path=f"/{path}")
        eventually(lambda: session.calls)
        call = session.calls[0]
    assert (call["usage"]["input_tokens"], call["finish_reason"], call["error"]) == (9, finish, None)


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        (chunked([b'data: {"type":"response.created"}\n\n']), "incomplete"),
        ([*chunked([b'data: {"type":"response.created"}\n\n'], end=False), b""], "cut"),
        (chunked([b'data: {"type":"response.failed","response":{"status":"failed"}}\n\n']), "failed"),
        (chunked([b'data: {"error":{"message":"overloaded"}}\n\n']), "failed"),
        (answer(b"<html>"), "garbage"),
        (answer(b'{"output":1}'), "garbage"),
        (answer(b'{"error":"no"}', status=500), "http"),
        (answer(b'{"error":"no"}', status=401), "http"),
        (answer(b'{"error":"maximum context length is 8"}', status=400), "too_long"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", b""], "cut"),
        ([b"nonsense\r\n\r\n", b""], "cut"),
    ],
)
def test_every_failure_has_its_word(gateway: Open, pieces: list[bytes], error: str) -> None:
    """The event names what went wrong, and the same body again is a retry of the same call."""
    with RawModel(pieces, OK) as model:
        session = gateway(model)
        for _ in range(3):
            try:
                posted(session, b'{"model":"m"}')
            except httpx.RemoteProtocolError:
                assert error == "cut"
        eventually(lambda: len(session.calls) == 3)
        calls = session.calls
    assert [call["error"] for call in calls] == [error, None, None]
    assert [(call["seq"], call["attempt"], call["retry"]) for call in calls] == [(1, 0, False), (1, 1, True), (2, 0, False)]


def test_call_that_failed_for_good_is_not_sent_again(gateway: Open) -> None:
    """An agent that would ask for ever is told so after max_retries + 1 tries; another call is another chance."""
    with RawModel(*([answer(b'{"error":"no"}', status=500)] * 5), OK) as model:
        session = gateway(model)
        replies = [posted(session, b'{"n":1}') for _ in range(7)]
        assert [reply.status_code for reply in replies] == [500] * 5 + [403] * 2
        assert replies[5].json()["error"]["code"] == "model_failed"
        assert replies[5].headers["x-should-retry"] == "false"
        assert len(model.requests) == 5
        eventually(lambda: bool(session.process.state.trouble))
        assert posted(session, b'{"n":2}').status_code == 200
        eventually(lambda: not session.process.state.trouble)


def test_calls_beyond_the_budget_are_refused_and_not_sent(gateway: Open) -> None:
    """403 with the code that says it, in a form that common clients do not retry; the list of models costs nothing."""
    with RawModel(OK) as model:
        session = gateway(model, max_calls=2)
        with httpx.Client(trust_env=False) as client:
            assert client.get(session.url + "/models").status_code == 200
        codes = [posted(session, b'{"n":%d}' % n) for n in range(4)]
        assert [reply.status_code for reply in codes] == [200, 200, 403, 403]
        assert codes[2].json()["error"]["code"] == "policy_budget_exhausted"
        assert codes[2].headers["x-should-retry"] == "false"
        assert len(model.requests) == 3
        eventually(lambda: session.process.state.exhausted)


def test_budget_holds_for_calls_at_the_same_time(gateway: Open) -> None:
    """Forty at once, ten allowed: ten are sent."""
    with RawModel(OK, pause_s=0.05) as model:
        session = gateway(model, max_calls=10)
        clients = []
        for number in range(40):
            client = session.connect()
            body = b'{"n":%d}' % number
            client.sendall(b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            clients.append(client)
        statuses = sorted(client.recv(65536).split()[1] for client in clients)
        assert statuses == [b"200"] * 10 + [b"403"] * 30
        assert len(model.requests) == 10
        for client in clients:
            client.close()


def test_client_that_leaves_takes_its_call_along(gateway: Open) -> None:
    """The connection to the model is closed at once, and the event says who left."""
    with RawModel([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", *[b""] * 200], pause_s=0.05) as model:
        session = gateway(model)
        client = session.connect()
        client.sendall(b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        eventually(lambda: model.requests)
        client.close()
        eventually(lambda: session.calls, within_s=3)
        assert session.calls[0]["error"] == "client_gone"


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /v1/responses", 404),
        ("POST /v1/models", 404),
        ("POST /v1/embeddings", 404),
        ("POST /admin", 404),
        ("DELETE /v1/responses", 404),
        ("CONNECT example:443", 404),
        ("POST http://example/v1x/responses", 404),
    ],
)
def test_what_is_no_model_call_goes_nowhere(gateway: Open, request_line: str, status: int) -> None:
    """The gateway is no proxy for anything else."""
    with RawModel(OK) as model:
        session = gateway(model)
        said = session.exchange(
            f"{request_line} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )
        assert int(said.split()[1]) == status, said
        assert model.requests == []


def test_bad_clients_do_not_disturb_others(gateway: Open) -> None:
    """Nonsense, an endless head and too large a body are refused; the next client is served."""
    with RawModel(OK) as model:
        session = gateway(model)
        assert b" 400 " in session.exchange(b"what is this\r\n\r\n").split(b"\r\n")[0] + b" "
        assert b" 431 " in session.exchange(b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20_000).split(b"\r\n")[0] + b" "
        with session.connect() as client:
            client.sendall(b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n")
            client.settimeout(10)
            with pytest.raises(OSError, match=r"."):  # noqa: PT012 (whichever call meets the closed connection)
                for _ in range(40):
                    client.sendall(b"x" * 1024 * 1024)
        assert posted(session, b"{}").status_code == 200
        assert len(model.requests) == 1


def test_http_1_0_expectations_and_keep_alive(gateway: Open) -> None:
    """Old clients get an answer that ends with the connection; Expect is answered; one connection serves many calls."""
    with RawModel(chunked([json.dumps(RESPONSE).encode()], kind="application/json")) as model:
        session = gateway(model)
        old = session.exchange(b"POST /v1/responses HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
        assert old.partition(b"\r\n\r\n")[2] == json.dumps(RESPONSE).encode()
        with session.connect() as client:
            client.sendall(b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 100 ")
            client.sendall(b"{}")
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        with httpx.Client(trust_env=False) as many:
            assert [many.post(session.url + "/responses", content=b"{}").status_code for _ in range(5)] == [200] * 5
        assert len(model.requests) == 7


def test_compressed_answer_is_passed_on_and_understood(gateway: Open) -> None:
    """The gateway asks for none; a server that compresses all the same is still read."""
    packed = gzip.compress(json.dumps(RESPONSE).encode())
    with RawModel(answer(packed, head=["Content-Encoding: gzip"])) as model:
        session = gateway(model)
        assert posted(session, b"{}", **{"accept-encoding": "gzip"}).json() == RESPONSE
        assert model.heads()[0]["accept-encoding"] == "identity"
        eventually(lambda: session.calls)
        assert session.calls[0]["usage"]["input_tokens"] == 7


def test_large_payloads_are_bounded_in_the_event(gateway: Open) -> None:
    """Twenty megabytes pass whole; the event holds head, tail, size and digest."""
    big = json.dumps({**RESPONSE, "padding": "y" * 20_000_000}).encode()
    body = b'{"x":"%b"}' % (b"z" * 5_000_000)
    with RawModel(answer(big)) as model:
        session = gateway(model)
        assert posted(session, body).content == big
        assert model.bodies()[0] == body
        eventually(lambda: session.calls, within_s=20)
        call = session.calls[0]
    assert (call["request_bytes"], call["response_bytes"]) == (len(body), len(big))
    assert len(json.dumps(call)) < 4 * 2**20
    assert call["error"] is None


def test_task_authority_is_trusted_and_a_stranger_is_not(gateway: Open, tmp_path: Path) -> None:
    """TLS is checked: against the authorities that travel along, and against those that the task's environment names."""
    context, cert = self_signed(tmp_path)
    with RawModel(OK, tls=context) as model:
        stranger = gateway(model, scheme="https")
        refused = posted(stranger, b"{}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (502, "model_unreachable")
        assert "CERTIFICATE_VERIFY_FAILED" in refused.json()["error"]["message"]
        known = gateway(model, scheme="https", env={"SSL_CERT_FILE": str(cert)})
        assert posted(known, b"{}").status_code == 200


def test_task_proxy_is_not_used(gateway: Open) -> None:
    """The task's proxy variables are the task's."""
    with RawModel(OK) as model, RawModel(answer(b"{}", status=502)) as proxy:
        address = f"http://127.0.0.1:{proxy.port}"
        session = gateway(model, env={"http_proxy": address, "HTTP_PROXY": address, "all_proxy": address})
        assert posted(session, b"{}").status_code == 200
        assert proxy.requests == []


def test_gateway_listens_on_loopback_only_and_hides_its_headers(gateway: Open) -> None:
    """Nobody outside the box reaches it, and no secret is in its command line or environment."""
    with RawModel(OK) as model:
        session = gateway(model, headers={"Authorization": "Bearer sk-hidden"})
        assert posted(session, b"{}").status_code == 200
        process = Path("/proc", str(session.process.pid))
        assert b"sk-hidden" not in (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        port = int(re.findall(r":(\d+)/", session.url)[0])
        listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if " 0A " in line]
        assert f"0100007F:{port:04X}" in listening
        assert f"00000000:{port:04X}" not in listening


def test_gateway_does_not_outlive_its_lifeline(gateway: Open) -> None:
    """When the supervisor is gone, so is the gateway, in the middle of a call as well."""
    with RawModel([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", *[b""] * 400], pause_s=0.05) as model:
        session = gateway(model)
        client = session.connect()
        client.sendall(b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        eventually(lambda: model.requests)
        session.process.hang_up()
        eventually(lambda: session.calls, within_s=5)
        assert session.calls[0]["error"] == "session_ended"
        eventually(lambda: not _alive(session.process.pid), within_s=5)
        client.close()


def _alive(pid: int) -> bool:
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


CACHED = [
    ('{"messages":[{"content":[{"text":"a","cache_control":{"type":"x"}}]}]}', '{"messages":[{"content":[{"text":"a"}]}]}'),
    ('{"tools":[{"cache_control":{}, "name":"t"}]}', '{"tools":[{"name":"t"}]}'),
    ('{"tools":[ {"cache_control" : [1,{"a":"}"}]} ] }', '{"tools":[ {} ] }'),
    ('{"tools":[{"a":1 , "cache_control":1,"cache_control":2 ,"b":1.50}]}', '{"tools":[{"a":1 ,"b":1.50}]}'),
    ('{"messages":[{"cache_control":{},"content":"cache_control"}]}', None),
    ('{"tools":[{"function":{"parameters":{"properties":{"cache_control":{}}}}}]}', None),
    ('{"cache_control":1,"system":[{"cache_control":1}]}', None),
    ('{"messages":[{"content":[{"cache_control":1}', None),
    ("[]", None),
]


@pytest.mark.parametrize(("body", "sent"), CACHED)
def test_cache_control_is_cut_out_exactly_there(body: str, sent: str | None) -> None:
    """Content parts and tools lose it; schemas, messages and strings keep it; nothing else changes by a byte."""
    assert without_cache_control(body.encode()).decode() == (body if sent is None else sent)


def test_cache_control_cut_is_what_a_parser_would_do() -> None:
    """Random bodies in random spacing: the cut text parses to the body without the field, in the field's places only."""
    chance = random.Random(7)

    def value(depth: int) -> Any:
        kind = chance.randrange(6 if depth else 4)
        plain = [1.5, 'q"}],{', None, True]
        if kind < 4:
            return plain[kind]
        if kind == 4:
            return [value(depth - 1) for _ in range(chance.randrange(3))]
        names = chance.sample(["a", "cache_control", "content", "tools", "messages", "é"], chance.randrange(5))
        return {name: value(depth - 1) for name in names}

    def stripped(part: Any) -> Any:
        return {key: one for key, one in part.items() if key != "cache_control"} if isinstance(part, dict) else part

    def items(some: Any) -> Any:
        return [stripped(part) for part in some] if isinstance(some, list) else some

    for _ in range(400):
        body = {
            "messages": [{"content": [value(2) for _ in range(3)], "x": value(2)}, value(3)],
            "tools": [value(3)],
            "z": value(3),
        }
        expected = {**body, "tools": items(body["tools"])}
        expected["messages"] = [
            {**message, "content": items(message["content"])} if isinstance(message, dict) and "content" in message else message
            for message in body["messages"]
        ]
        text = json.dumps(body, indent=chance.choice([None, 0, 3]), ensure_ascii=chance.choice([True, False]))
        assert json.loads(without_cache_control(text.encode())) == expected


def test_cache_control_stays_where_it_is_the_dialects_own(gateway: Open) -> None:
    """Anthropic's messages mean it; chat servers refuse it."""
    body = b'{"model":"m","tools":[{"name":"t","cache_control":{}}]}'
    with RawModel(OK) as model:
        session = gateway(model)
        for path in ("/chat/completions", "/responses", "/messages"):
            posted(session, body, path=path)
        cut = body.replace(b',"cache_control":{}', b"")
        assert model.bodies() == [cut, cut, body]
        eventually(lambda: len(session.calls) == 3)


def test_idle_connection_that_the_model_closed_is_not_used(gateway: Open) -> None:
    """The next call gets a new connection instead of an error."""
    with RawModel([*OK, b""]) as model:
        session = gateway(model)
        for number in range(3):
            assert posted(session, b'{"n":%d}' % number).status_code == 200
            eventually(lambda number=number: len(model.requests) == number + 1)
        assert [call["error"] for call in session.calls] == [None] * 3


def test_no_descriptor_is_left_behind(gateway: Open) -> None:
    """Fifty clients that come and go cost nothing that stays."""
    with RawModel(OK) as model:
        session = gateway(model)
        posted(session, b"{}")
        folder = Path("/proc", str(session.process.pid), "fd")
        before = sum(1 for _ in folder.iterdir())
        for number in range(50):
            with socket.create_connection(("127.0.0.1", int(re.findall(r":(\d+)/", session.url)[0]))) as client:
                client.sendall(b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"[: number * 3])
        eventually(lambda: sum(1 for _ in folder.iterdir()) <= before + 1)
