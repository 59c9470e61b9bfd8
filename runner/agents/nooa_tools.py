# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Functions of other servers as methods of a NOOA agent: `await self.<function>(…)` is a POST to the server that grants it.

Arguments are validated (JSON Schema 2020-12) before anything is sent, and what is wrong with them comes back to the model as
{"error": …}; so does whatever the server answers, as JSON or text. Calls of one server are serialised, and its cookies are its
own. It refuses to go on without a required server: that is nobody's failure but the infrastructure's, and no cell can catch it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import keyword
import os
import ssl
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.cookies import CookieError, SimpleCookie
from typing import Any

import certifi
import httpx
from jsonschema import Draft202012Validator, SchemaError

from boxstrap.runner.agents.event_writer import EventWriter, clip
from boxstrap.runner.wire import TOOL_FAILED, TOOLS_PATH, Kind, ToolAccess

CONNECT_S, ANSWER_S = 30.0, 600.0
CONNECT_TRIES, CONNECT_PAUSE_S = 3, 0.5
"""A connection that is refused was not a call yet, so it is tried again; a call that broke off may have been served."""

_TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}
_RESERVED = frozenset({"llm", "shell", "repo", "todo", "context", "events"})


class ResourceFailedError(BaseException):
    """A required server cannot be reached. No Exception: the agent's own code must not catch it."""


class _UnreachableError(Exception):
    pass


class Server:
    """One granted server: its jar, its lock, its connections."""

    def __init__(self, access: ToolAccess, gateway: str) -> None:
        self.access = access
        self._relayed = bool(gateway)
        self.cookies = dict(access.cookies)
        self.lock = asyncio.Lock()
        self._base = f"{gateway}{TOOLS_PATH}{access.name}" if gateway else access.base_url.rstrip("/")
        self._http = httpx.AsyncClient(
            verify=ssl.create_default_context(cafile=certifi.where()) if self._base.startswith("https") else False,
            trust_env=False,  # the task's proxies and .netrc are the task's
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
            headers=dict(access.headers),
        )

    async def post(self, name: str, arguments: Mapping[str, object]) -> tuple[int, object]:
        """Call a function; return the HTTP status and the answer.

        Raises:
            _UnreachableError: there was no answer.
        """
        jar = "; ".join(f"{key}={value}" for key, value in self.cookies.items())
        for attempt in range(CONNECT_TRIES):
            if attempt:
                await asyncio.sleep(CONNECT_PAUSE_S * attempt)
            try:
                sent = {"cookie": jar} if jar else {}
                response = await self._http.post(f"{self._base}/{name}", json=arguments, headers=sent)
                break
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                problem: Exception = error
            except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
                raise _UnreachableError(f"{type(error).__name__}: {error or 'no further word'}") from error
        else:
            raise _UnreachableError(f"{type(problem).__name__}: {problem} (tried {CONNECT_TRIES} times)") from problem
        self._http.cookies.clear()  # the jar is ours: one for a server, whatever its domain
        self._keep(response.headers.get_list("set-cookie"))
        try:
            answer = json.loads(response.content)
        except ValueError:
            return response.status_code, response.content.decode("utf-8", "replace")
        told = answer.get("error") if self._relayed and isinstance(answer, dict) else None
        if isinstance(told, dict) and told.get("code") == TOOL_FAILED:
            raise _UnreachableError(str(told.get("message")))
        return response.status_code, answer

    def _keep(self, lines: Sequence[str]) -> None:
        for line in lines:
            told: SimpleCookie = SimpleCookie()
            with contextlib.suppress(CookieError):
                told.load(line)
            for key, morsel in told.items():
                if morsel["max-age"] == "0":
                    self.cookies.pop(key, None)
                else:
                    self.cookies[key] = morsel.value


class Function:
    """One function as a method: its validator, its Python signature, and where it is served."""

    def __init__(self, server: Server, tool: Mapping[str, Any]) -> None:
        self.server = server
        self.name = str(tool["name"])
        self.description = str(tool.get("description") or f"Call the server's {self.name}.")
        schema = tool.get("parameters") or {"type": "object", "properties": {}}
        Draft202012Validator.check_schema(schema)
        self._validator = Draft202012Validator(schema)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        self._defaults = {
            key: value["default"] for key, value in properties.items() if isinstance(value, dict) and "default" in value
        }
        ordered = sorted(properties, key=lambda key: key not in required)
        self.signature = inspect.Signature(
            [
                inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
                *(self._parameter(key, properties[key], key in required) for key in ordered),
            ],
            return_annotation=Any,
        )

    def _parameter(self, name: str, schema: Any, required: bool) -> inspect.Parameter:
        kind = schema.get("type") if isinstance(schema, dict) else None
        return inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=inspect.Parameter.empty if required else self._defaults.get(name),
            annotation=_TYPES.get(kind, Any) if isinstance(kind, str) else Any,
        )

    def arguments(self, args: tuple[Any, ...], given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Return the arguments as the server gets them, and what is wrong with them."""
        try:
            bound = dict(self.signature.bind(None, *args, **given).arguments)
        except TypeError as error:
            return dict(given), str(error)
        del bound["self"]
        try:
            plain: dict[str, Any] = json.loads(json.dumps({**self._defaults, **bound}, allow_nan=False))
        except (TypeError, ValueError) as error:
            return {key: repr(value) for key, value in bound.items()}, f"no JSON: {error}"
        problem = next(iter(sorted(self._validator.iter_errors(plain), key=lambda error: list(map(str, error.path)))), None)
        return plain, "" if problem is None else clip(problem.message, 2000)


class ResourceTools:
    """All functions that a session was granted.

    Args:
        accesses: the servers and their functions.
        events: where each call is told.
        parents: says in whose invocation and cell the calling context is.
        jar: the file that holds the servers' cookies, for the controller.
        gateway: where the session's gateway listens, when the controller makes the calls.
        fail: called once when a required server failed for good, to end the session.
    """

    def __init__(
        self,
        accesses: Sequence[ToolAccess],
        events: EventWriter,
        *,
        parents: Callable[[], Mapping[str, object]],
        jar: str,
        gateway: str,
        fail: Callable[[], None],
    ) -> None:
        self.failure: ResourceFailedError | None = None
        self._events, self._parents, self._jar, self._fail = events, parents, jar, fail
        self._servers = [Server(access, gateway) for access in accesses]
        self.functions = [Function(server, tool) for server in self._servers for tool in _tools_of(server.access)]

    def extend(self, agent_class: Any) -> Any:
        """Return a subclass of the agent with the functions as methods.

        Raises:
            ValueError: two functions, or a function and what the agent has, share a name.
        """
        methods: dict[str, Any] = {"__module__": agent_class.__module__, "__doc__": agent_class.__doc__}
        for function in self.functions:
            if function.name in methods or function.name in _RESERVED or hasattr(agent_class, function.name):
                raise ValueError(f"tool {function.name!r}: the agent has that name already")
            methods[function.name] = self._method(function, agent_class.__name__)
        if not self.functions:
            return agent_class
        own = getattr(agent_class, "_execution_config", None)  # each class statement sets it anew
        more = {} if own is None else {"execution": own}
        return type(agent_class)(f"{agent_class.__name__}WithResources", (agent_class,), methods, **more)

    def check(self, agent: Any) -> None:
        """Refuse an agent whose own attributes hide a function.

        Raises:
            ValueError: with its name.
        """
        for function in self.functions:
            if function.name in vars(agent):
                raise ValueError(f"tool {function.name!r}: the agent has an attribute of that name")

    def _method(self, function: Function, owner: str) -> Any:
        async def method(_: Any, /, *args: Any, **given: Any) -> Any:
            return await self._call(function, args, given)

        method.__name__ = function.name
        method.__qualname__ = f"{owner}.{function.name}"
        method.__doc__ = function.description
        method.__module__ = __name__
        setattr(method, "__signature__", function.signature)  # noqa: B010 (functions have no such attribute to mypy)
        setattr(method, "_no_trace", True)  # noqa: B010 (the call is told here, and is no agent's)
        return method

    async def _call(self, function: Function, args: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
        if self.failure is not None:
            raise self.failure
        arguments, problem = function.arguments(args, given)
        with self._told(function, arguments) as account:
            if problem:
                account |= {"status": "failed", "error_type": "invalid_arguments"}
                return _answered(account, {"error": f"Invalid arguments for {function.name}: {problem}"})
            async with function.server.lock:
                account["waited"] = round(time.monotonic() - float(account.pop("clock")), 6)
                try:
                    status, answer = await function.server.post(function.name, arguments)
                except _UnreachableError as error:
                    account |= {"status": "failed", "error_type": "unreachable"}
                    _answered(account, {"error": f"{function.server.access.name} cannot be reached: {error}"})
                    return self._without(function.server.access, error, account["output"])
            account["http_status"] = status
            if status >= httpx.codes.BAD_REQUEST:
                account |= {"status": "failed", "error_type": f"http_{status}"}
            self._write_jar()
            return _answered(account, answer)

    def _without(self, access: ToolAccess, error: Exception, output: object) -> object:
        """Go on without an optional server; without a required one nothing goes on."""
        if not access.required:
            self._events.emit(Kind.GAP, {"code": "resource_unavailable", "detail": f"{access.name}: {error}"})
            return output
        self.failure = ResourceFailedError(f"{access.name} at {access.base_url} cannot be reached: {error}")
        self._fail()
        raise self.failure from error

    @contextlib.contextmanager
    def _told(self, function: Function, arguments: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        """Tell of a call when it ended, however it did."""
        begun, clock = time.time(), time.monotonic()
        account: dict[str, Any] = {"status": "cancelled", "clock": clock}
        told: dict[str, object] = {"call_id": f"resource-{uuid.uuid4().hex}", "tool_name": function.name}
        told |= {"access": function.server.access.name, **self._parents(), "started_at": begun}
        told["arguments"] = {key: clip(value) if isinstance(value, str) else value for key, value in arguments.items()}
        try:
            yield account
        finally:
            account.pop("clock", None)
            output = account.pop("output", None)
            shown = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
            ended = {"completed_at": time.time(), "seconds": round(time.monotonic() - clock, 6)}
            self._events.emit(Kind.RESOURCE_CALL, {**told, **account, **ended, "output": clip(shown)})

    def _write_jar(self) -> None:
        """Leave the cookies where the controller finds them, also when this process is killed."""
        if not self._jar:
            return
        part = f"{self._jar}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with open(os.open(part, flags, 0o600), "w", encoding="ascii") as file:
            json.dump({server.access.name: server.cookies for server in self._servers}, file)
        os.replace(part, self._jar)


def _answered(account: dict[str, Any], output: object) -> object:
    account["output"] = output
    if account["status"] == "cancelled":  # it was on its way until now
        account["status"] = "completed"
    return output


def _tools_of(access: ToolAccess) -> Iterator[Mapping[str, Any]]:
    """Yield an access's functions.

    Raises:
        ValueError: one of them is no function, or cannot be a method.
    """
    for tool in access.tools:
        name, schema = tool.get("name"), tool.get("parameters") or {"type": "object"}
        if tool.get("type") != "function":
            raise ValueError(f"{access.name}: found a tool of type {tool.get('type')!r}, needed function")
        if not isinstance(name, str) or not _is_public(name):
            raise ValueError(f"{access.name}: found a function named {name!r}, needed a public Python identifier")
        if not isinstance(schema, dict) or schema.get("type") != "object":
            raise ValueError(f"{access.name}.{name}: found parameters that are no object schema, needed type object")
        for key in schema.get("properties", {}):
            if not _is_public(key) or key == "self":
                raise ValueError(f"{access.name}.{name}: found a parameter named {key!r}, needed a public Python identifier")
        try:
            Draft202012Validator.check_schema(schema)
        except SchemaError as error:
            raise ValueError(f"{access.name}.{name}: its parameters are no JSON Schema: {error.message}") from error
        yield tool


def _is_public(name: str) -> bool:
    return name.isidentifier() and not name.startswith("_") and not keyword.iskeyword(name)
