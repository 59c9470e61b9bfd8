# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""NOOA's model clients over httpx: the Responses and the Chat Completions dialect, as NOOA's own clients speak them.

Bodies, message formats and tool schemas are those of NOOA's stock clients (which these derive from, so that NOOA picks the
same formatter), but for two fields: cache_control, which NeMo Gym refuses and OpenAI rejects, and prompt_cache_key, which NOOA
makes up per run and older Gyms refuse. litellm, which the stock clients need, is never touched. They refuse to retry: that
is done in one place, model_endpoint.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from nooa.unifiedllm import (
    CompletionClient,
    LLMResponse,
    ResponsesClient,
    ToolCall,
    UnifiedLLM,
    extract_and_parse_json,
    unifiedllm,
)

from boxstrap.runner.agents.model_endpoint import ModelEndpoint

_SAMPLING = ("temperature", "top_p")
_CHAT_FINISH = {"length": "length", "tool_calls": "tool_calls", "content_filter": "error", "error": "error"}

Message = dict[str, Any]


class _Client:
    """What both dialects share: no litellm, own token count and window, one endpoint."""

    endpoint: ModelEndpoint
    names: ClassVar[Mapping[str, str]] = {}
    """What this dialect calls a parameter that the session names as the Responses dialect does."""

    def __init__(self, endpoint: ModelEndpoint, options: Mapping[str, Any]) -> None:
        UnifiedLLM.__init__(self, endpoint.name)  # not super(): the stock constructors build litellm transports
        self.endpoint = endpoint
        self._parameters = {self.names.get(key, key): value for key, value in options.get("model_parameters", {}).items()}
        self._window: int | None = options.get("context_window")
        self._replay_reasoning = bool(options.get("replay_reasoning"))

    @property
    def context_window(self) -> int | None:
        """Tokens that the model takes; None when nobody said."""
        return self._window

    def count_tokens(self, text: str) -> int:
        """Estimate by the ratio that the last answer's usage gave."""
        return int(len(text) * self.endpoint.tokens_per_byte) + 1

    def call(self, *args: object, **kwargs: object) -> LLMResponse:
        """Refuse: a blocking call would stop the agent's event loop."""
        raise NotImplementedError("this model client only has acall")

    async def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self.endpoint.post({**body, **self._parameters})


class ResponsesModel(_Client, ResponsesClient):  # type: ignore[misc] # NOOA is not there to type-check
    """POST …/responses."""

    async def acall(
        self, messages: list[Message], tools: list[Any] | None = None, output_model: Any = None, **more: Any
    ) -> LLMResponse:
        """Ask once."""
        items, instructions = self._transform_messages(without_cache_control(messages))
        body: dict[str, Any] = {"model": self.model, "input": items, "truncation": "disabled"}
        if instructions:
            body["instructions"] = instructions
        if tools:
            body["tools"] = [self._convert_tool_to_schema(tool) for tool in tools]
            body |= {"tool_choice": more.get("tool_choice") or "auto", "parallel_tool_calls": False}
        if output_model is not None:
            schema = {"name": output_model.__name__, "strict": False, "schema": output_model.model_json_schema()}
            body["text"] = {"format": {"type": "json_schema", **schema}}
        body |= {key: more[key] for key in _SAMPLING if more.get(key) is not None}
        if more.get("max_tokens") is not None:
            body["max_output_tokens"] = more["max_tokens"]
        return self._response(await self._ask(body), output_model)

    def _response(self, reply: dict[str, Any], output_model: Any) -> LLMResponse:
        output = reply["output"]
        calls = [
            ToolCall(id=item.get("call_id") or "", name=item.get("name") or "", arguments=item.get("arguments") or "")
            for item in output
            if item.get("type") == "function_call"
        ]
        text = "\n".join(
            part.get("text") or part.get("refusal") or ""
            for item in output
            if item.get("type") == "message"
            for part in item.get("content") or []
        )
        assistant: Message = {"role": "assistant", "content": text}
        if calls:
            assistant = {"_batch": output}
        reasoning = [item for item in output if item.get("type") == "reasoning"]
        if self._replay_reasoning and reasoning:
            assistant["reasoning_items"] = reasoning
        return _answer(reply, calls, text, _responses_finish(reply), assistant, output_model)


class ChatModel(_Client, CompletionClient):  # type: ignore[misc] # NOOA is not there to type-check
    """POST …/chat/completions."""

    names: ClassVar[Mapping[str, str]] = {"max_output_tokens": "max_tokens"}

    async def acall(
        self, messages: list[Message], tools: list[Any] | None = None, output_model: Any = None, **more: Any
    ) -> LLMResponse:
        """Ask once."""
        body: dict[str, Any] = {"model": self.model, "messages": without_cache_control(messages)}
        for message in body["messages"]:
            message.pop("reasoning_items", None)
            if message.get("content", "") is None:
                del message["content"]  # as the stock client's litellm does
        if tools:
            body["tools"] = [self._convert_tool_to_schema(tool) for tool in tools]
            body |= {"tool_choice": more.get("tool_choice") or "auto", "parallel_tool_calls": False}
        if output_model is not None:
            schema = {"name": output_model.__name__, "strict": False, "schema": output_model.model_json_schema()}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        body |= {key: more[key] for key in (*_SAMPLING, "max_tokens") if more.get(key) is not None}
        return self._response(await self._ask(body), bool(tools), output_model)

    def _response(self, reply: dict[str, Any], had_tools: bool, output_model: Any) -> LLMResponse:
        choice = reply["choices"][0]
        message = choice["message"]
        text = message.get("content") or ""
        calls = [
            ToolCall(id=call["id"], name=call["function"].get("name") or "", arguments=call["function"].get("arguments") or "")
            for call in message.get("tool_calls") or []
        ]
        if not calls and had_tools and "<tool_call>" in text:
            calls = unifiedllm._extract_xml_tool_calls(text)
        assistant: Message = {"role": "assistant", "content": text}
        if calls:
            assistant["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        finish = _CHAT_FINISH.get(choice.get("finish_reason") or "", "stop")
        reasoning = message.get("reasoning") or message.get("reasoning_content")
        return _answer(reply, calls, text, finish, assistant, output_model, reasoning)


def _answer(
    reply: dict[str, Any],
    calls: list[Any],
    text: str,
    finish: str,
    assistant: Message,
    output_model: Any,
    reasoning: str | None = None,
) -> LLMResponse:
    """Build NOOA's answer as its stock clients do: text beside a tool call is dropped."""
    content: Any = "" if calls else text
    if output_model is not None and not calls:
        content = output_model.model_validate(extract_and_parse_json(text or reasoning or ""))
    return LLMResponse(
        raw_response=reply,
        content=content,
        tool_calls=calls,
        finish_reason="tool_calls" if calls else finish,
        assistant_message=assistant,
        reasoning=reasoning,
        usage=reply.get("usage"),
    )


def _responses_finish(reply: Mapping[str, Any]) -> str:
    if reply.get("status") != "incomplete":
        return "stop"
    return "length" if (reply.get("incomplete_details") or {}).get("reason") == "max_output_tokens" else "error"


def without_cache_control(messages: list[Message]) -> list[Message]:
    """Return copies of the messages without cache_control on them or on their content parts."""
    cleaned = []
    for message in messages:
        copy = {key: value for key, value in message.items() if key != "cache_control"}
        if isinstance(copy.get("content"), list):
            copy["content"] = [
                {key: value for key, value in part.items() if key != "cache_control"} if isinstance(part, dict) else part
                for part in copy["content"]
            ]
        cleaned.append(copy)
    return cleaned
