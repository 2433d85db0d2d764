"""Does tasks with a library's own loop of calls and results, and prints the last answers as JSON.

Arguments: the library, a server's address, a model, the tasks.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

library, url, model, *tasks = sys.argv[1:]


def read_file(path: str) -> str:
    """Read a file.

    Args:
        path: of the file
    """
    return Path(path).read_text() if Path(path).is_file() else f"There is no file {path!r}."


def edit_file(path: str, old: str, new: str) -> str:
    """Replace a text of a file by another.

    Args:
        path: of the file
        old: the text that is replaced
        new: the text that replaces it
    """
    if not Path(path).is_file() or old not in Path(path).read_text():
        return f"There is no file {path!r} with this text."
    Path(path).write_text(Path(path).read_text().replace(old, new))
    return "edited"


def run_command(command: str) -> str:
    """Run a command and return what it prints.

    Args:
        command: a line for the shell
    """
    finished = subprocess.run(command, shell=True, capture_output=True, text=True)
    return finished.stdout + finished.stderr


FUNCTIONS = [read_file, edit_file, run_command]


def result_of(name: str, arguments: dict[str, Any]) -> str:
    """The result of a call in the loops that are written here; a mistake of the model is one, too."""
    function = next((function for function in FUNCTIONS if function.__name__ == name), None)
    try:
        return f"There is no tool {name}." if function is None else function(**arguments)
    except TypeError as error:  # an argument is missing or unknown
        return f"Error: {error}"


def openai(task: str) -> str:
    from openai import OpenAI, pydantic_function_tool
    from pydantic import create_model

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    tools = []
    for function in FUNCTIONS:
        fields = {name: (str, ...) for name in function.__annotations__ if name != "return"}
        made = create_model(function.__name__, __doc__=function.__doc__, **fields)
        tools.append(pydantic_function_tool(made, name=function.__name__))
    turns: list[Any] = [{"role": "user", "content": task}]
    while True:
        message = client.chat.completions.create(model=model, messages=turns, tools=tools).choices[0].message
        if not message.tool_calls:
            return message.content or ""
        turns.append(message)
        for call in message.tool_calls:
            result = result_of(call.function.name, json.loads(call.function.arguments))
            turns.append({"role": "tool", "tool_call_id": call.id, "content": result})


def openai_agents(task: str) -> str:
    from agents import (
        Agent,
        Runner,
        function_tool,
        set_default_openai_api,
        set_default_openai_client,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
    set_default_openai_api("chat_completions" if library == "openai-agents chat" else "responses")
    tools = [function_tool(function) for function in FUNCTIONS]
    agent = Agent(name="Clerk", instructions="Be brief.", model=model, tools=tools)
    if library == "openai-agents stream":

        async def streamed() -> str:
            run = Runner.run_streamed(agent, task)
            async for _ in run.stream_events():
                pass
            return str(run.final_output)

        return asyncio.run(streamed())
    return str(Runner.run_sync(agent, task).final_output)


def pydantic_ai(task: str) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    openai = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    models = {
        "pydantic-ai chat": lambda: OpenAIChatModel(model, provider=openai),
        "pydantic-ai responses": lambda: OpenAIResponsesModel(model, provider=openai),
        "pydantic-ai messages": lambda: AnthropicModel(model, provider=AnthropicProvider(base_url=url, api_key="none")),
    }
    return str(Agent(models[library](), tools=FUNCTIONS, instructions="Be brief.").run_sync(task).output)


def smolagents(task: str) -> str:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    asked = OpenAIModel(model_id=model, api_base=f"{url}/v1", api_key="none")
    return str(ToolCallingAgent(tools=[tool(function) for function in FUNCTIONS], model=asked, max_steps=4).run(task))


def langchain(task: str) -> str:
    from langchain.agents import create_agent

    if library == "langchain openai":
        from langchain_openai import ChatOpenAI

        chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model)
    elif library == "langchain anthropic":
        from langchain_anthropic import ChatAnthropic

        chat = ChatAnthropic(base_url=url, api_key="none", model=model)
    else:
        from langchain_ollama import ChatOllama

        chat = ChatOllama(base_url=url, model=model)
    turns = create_agent(chat, FUNCTIONS).invoke({"messages": [{"role": "user", "content": task}]})
    return turns["messages"][-1].text


def anthropic(task: str) -> str:
    from anthropic import Anthropic, beta_tool

    asked = {"model": model, "max_tokens": 4000, "messages": [{"role": "user", "content": task}]}
    client = Anthropic(base_url=url, api_key="none", max_retries=0)
    runner = client.beta.messages.tool_runner(**asked, tools=[beta_tool(function) for function in FUNCTIONS])
    return "".join(block.text for block in runner.until_done().content if block.type == "text")


def ollama(task: str) -> str:
    from ollama import Client

    client, turns = Client(url), [{"role": "user", "content": task}]
    while True:
        message = client.chat(model=model, messages=turns, tools=FUNCTIONS).message
        if not message.tool_calls:
            return message.content or ""
        turns.append(message)
        for call in message.tool_calls:
            result = result_of(call.function.name, call.function.arguments)
            turns.append({"role": "tool", "tool_name": call.function.name, "content": result})


loops = {
    "openai": openai,
    "openai-agents": openai_agents,
    "pydantic-ai": pydantic_ai,
    "smolagents": smolagents,
    "langchain": langchain,
    "anthropic": anthropic,
    "ollama": ollama,
}
loop = loops[library.partition(" ")[0]]
print(json.dumps([loop(task) for task in tasks]))
