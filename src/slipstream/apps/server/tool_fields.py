"""The tools that a request offers, checked before a template or a grammar reads them."""

from __future__ import annotations

import json
from typing import Any

from slipstream.apps.server.error_objects import refused
from slipstream.apps.server.request_fields import ConversationFields, ToolChoice
from slipstream.errors import did_you_mean

LONGEST_NAME = 256


def checked_tools(fields: ConversationFields) -> list[dict[str, Any]]:
    """The tools of a request; ApiError naming the first that is none."""
    tools = fields.tools or []
    for at, tool in enumerate(tools):
        _check(f"tools.{at}", tool)
    names = [tool["function"]["name"] for tool in tools]
    if twice := [name for name in names if names.count(name) > 1]:
        raise refused(f"tools: {twice[0]!r} is there twice; allowed: names that differ", "tools")
    return tools


def _check(place: str, tool: dict[str, Any]) -> None:
    if tool.get("type", "function") != "function":
        raise refused(f"{place}.type: {tool.get('type')!r:.40}; allowed: 'function'", f"{place}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise refused(f"{place}.function; allowed: an object with a name and parameters", f"{place}.function")
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise refused(
            f"{place}.function.name: {name!r:.40}; allowed: a text of at most {LONGEST_NAME} characters",
            f"{place}.function.name",
        )
    if not isinstance(function.get("description", ""), str | None):
        raise refused(f"{place}.function.description; allowed: a text", f"{place}.function.description")
    _check_parameters(f"{place}.function.parameters", function.get("parameters"))
    check_json(place, tool)


def check_json(place: str, value: Any) -> None:
    """Refuse what templates and tokenizers cannot write: halves of surrogate pairs, and what is nested too deep."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise refused(f"{place}; allowed: JSON of valid Unicode (no lone surrogates)", place) from None


def _check_parameters(place: str, parameters: Any) -> None:
    if parameters is None:
        return
    if not isinstance(parameters, dict):
        raise refused(f"{place}; allowed: a JSON schema, which is an object", place)
    if parameters.get("type", "object") != "object":
        raise refused(f"{place}.type: {parameters['type']!r:.40}; allowed: 'object'", place)
    properties = parameters.get("properties", {})
    if not isinstance(properties, dict) or not all(isinstance(one, dict | bool) for one in properties.values()):
        raise refused(f"{place}.properties; allowed: an object of JSON schemas", place)


def forced_tools(fields: ConversationFields, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools of which one must be called: all for "required", else the one that `tool_choice` names."""
    if not tools:
        raise refused("tool_choice without tools; allowed: 'none', 'auto'", "tool_choice")
    if fields.tool_choice == "required":
        return tools
    assert isinstance(fields.tool_choice, ToolChoice)
    name = fields.tool_choice.function.name
    named = [tool for tool in tools if tool["function"]["name"] == name]
    if not named:
        offered = ", ".join(tool["function"]["name"] for tool in tools)
        near = did_you_mean(name, *(tool["function"]["name"] for tool in tools))
        raise refused(f"tool_choice: {name!r:.80} is not offered; allowed: {offered:.200}{near}", "tool_choice")
    return named
