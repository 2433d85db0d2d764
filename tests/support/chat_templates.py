"""Small chat templates, each with a trap of a real one, and the real ones that are on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream import SpeculativeDecoder
from slipstream.models.cache_folder import cache_folder
from tests.support import tiny_models

TOOLS = "{% for tool in tools or [] %}tool {{ tool.function.name }}\n{% endfor %}"
OPENING = "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>\n'
    "{% endfor %}"
)


def _each(body: str, tools: str = TOOLS) -> str:
    return f"{tools}{{% for m in messages %}}{body}{{% endfor %}}{OPENING}"


def _message(calls: str = CALLS, thought: str = "") -> str:
    return f"<|{{{{ m.role }}}}|>\n{thought}{{{{ m.content }}}}\n{calls}"


TEMPLATES = {
    "plain": _each(_message()),
    # Qwen3.5's, of which Claude Code's and Codex' first requests meet the refusal
    "system first": _each(
        "{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
        + _message(thought="{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}")
    ),
    # DeepSeek V3's
    "arguments as text": _each(
        _message("{% for c in m.tool_calls or [] %}{{ '```json\n' + c.function.arguments + '\n```' }}{% endfor %}")
    ),
    # gpt-oss'
    "thought or text": _each(
        "{% if m.tool_calls and m.content and m.thinking %}"
        "{{ raise_exception('Cannot pass both content and thinking.') }}{% endif %}"
        + _message(thought="{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}")
    ),
    # Mistral's
    "alternation": _each(
        "{% if m.role == 'system' and not loop.first %}{{ raise_exception('Only one system message.') }}{% endif %}"
        "{% if loop.previtem is defined and m.role == 'user' == loop.previtem.role %}"
        "{{ raise_exception('Roles must alternate.') }}{% endif %}"
        "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
        "{{ raise_exception('Tool call IDs should be strings with length 9!') }}{% endif %}{% endfor %}" + _message()
    ),
    # SmolLM2's
    "no tools": _each(_message(calls=""), tools=""),
    # Gemma's of the second generation
    "no system": _each(
        "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + _message()
    ),
}
REAL = {
    name: file.read_text(encoding="utf-8")
    for name in ("smollm2", "qwen0.5b")
    if (file := cache_folder() / name / "chat_template.jinja").is_file()
}


def decoder_without_tools(**settings: Any) -> SpeculativeDecoder:
    """A tiny model whose template reads no tools."""
    tokenizer = tiny_models.byte_tokenizer(TEMPLATES["no tools"])
    model = tiny_models.fresh("llama", vocab_size=len(tokenizer), max_position_embeddings=4096, eos_token_id=1)
    drafting: dict[str, Any] = {"drafter": "suffix", "num_draft_tokens": 4, "acceptance": "match"}
    return SpeculativeDecoder(model, tokenizer=tokenizer, **drafting | settings)


_LAST_QUESTION = (  # the number of the last message of the user: thoughts are shown after it only
    "{% set last = namespace(user=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
)
_CHATML_TOOLS = "# Tools\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools>"
_TOOL_TURN = (
    "{% if loop.previtem is not defined or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
)
_JSON_CALL = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'


def _chatml(system: str, answer: str, opening: str = "", head: str = _LAST_QUESTION) -> str:
    """A template with ChatML's marks, which shows results of tools in turns of the user."""
    return (
        head + "{% if tools %}<|im_start|>system\n{{ messages[0].content + '\n\n' if messages[0].role == 'system' }}"
        f"{_CHATML_TOOLS}<|im_end|>\n{{% endif %}}{{% for m in messages %}}{{% if m.role == 'tool' %}}{_TOOL_TURN}"
        f"{{% elif m.role == 'assistant' %}}<|im_start|>assistant\n{answer}<|im_end|>\n"
        f"{{% elif m.role == 'system' %}}{system}"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{opening}{{% endif %}}"
    )


_SYSTEM = "{% if not (loop.first and tools) %}<|im_start|>system\n{{ m.content }}<|im_end|>\n{% endif %}"
_QWEN_CALLS = f"{{% for c in m.tool_calls or [] %}}\n<tool_call>\n{_JSON_CALL}\n</tool_call>{{% endfor %}}"
_EMPTY_THOUGHT = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"

# what the templates of ten families do with a conversation: marks, order of roles, thoughts, arguments, results
FAMILIES = {
    "Qwen 2.5": _chatml(_SYSTEM, "{{ m.content }}" + _QWEN_CALLS),
    "Qwen 3": _chatml(
        _SYSTEM,
        "{% if loop.index0 > last.user and m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
        "{% endif %}{{ m.content }}" + _QWEN_CALLS,
        _EMPTY_THOUGHT,
    ),
    "Qwen 3.5": _chatml(
        "{% if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}" + _SYSTEM,
        "{% if loop.index0 > last.user %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n<function={{ c.function.name }}>\n"
        "{% for key, value in c.function.arguments | items %}<parameter={{ key }}>\n{{ value }}\n</parameter>\n"
        "{% endfor %}</function>\n</tool_call>{% endfor %}",
        _EMPTY_THOUGHT.replace("{% endif %}", "{% else %}<think>\n{% endif %}"),
        _LAST_QUESTION + "{% if last.user < 0 %}{{ raise_exception('No user query found in messages.') }}{% endif %}",
    ),
    "SmolLM3": (  # describes `xml_tools` only, and shows results as texts of the user
        "{% set mode = '/no_think' if enable_thinking is defined and not enable_thinking else '/think' %}"
        "<|im_start|>system\nReasoning Mode: {{ mode }}\n\n"
        "{{ messages[0].content if messages[0].role == 'system' else 'You are SmolLM.' }}\n\n"
        "{% for t in xml_tools or [] %}<tools>{{ t }}</tools><tool_call>{% endfor %}<|im_end|>\n{% for m in messages %}"
        "{% if m.role in ('user', 'tool') %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
        "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{{ '<think>\n\n</think>\n' if mode == '/no_think' }}{% endif %}"
    ),
    "GLM 4": (
        "[gMASK]<sop>{% if tools %}<|system|>\n# Tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n</tool_call>"
        f"{{% endif %}}{_LAST_QUESTION}{{% for m in messages %}}{{% if m.role == 'tool' %}}"
        "{% if loop.previtem is not defined or loop.previtem.role != 'tool' %}<|observation|>{% endif %}"
        "\n<tool_response>\n{{ m.content }}\n</tool_response>"
        "{% elif m.role == 'assistant' %}<|assistant|>\n"
        "<think>{{ m.reasoning_content if loop.index0 > last.user and m.reasoning_content }}</think>"
        "{{ '\n' + m.content if m.content }}{% for c in m.tool_calls or [] %}"
        "{% if c.function.arguments is not mapping %}{{ raise_exception('Invalid tool call arguments') }}{% endif %}"
        "\n<tool_call>{{ c.function.name }}\n{% for key, value in c.function.arguments | items %}"
        "<arg_key>{{ key }}</arg_key>\n<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n"
        "{% endfor %}</tool_call>{% endfor %}{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "gpt-oss": (  # writes one call of a message, and no thoughts of calls before an answer
        "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}\n\n# Valid channels<|end|>"
        "{% set turns = messages[1:] if messages[0].role == 'system' else messages %}"
        "{% if tools or messages[0].role == 'system' %}<|start|>developer<|message|>"
        "{{ messages[0].content if messages[0].role == 'system' }}{% for t in tools or [] %}"
        "{{ '// ' + t.function.description + '\n' }}type {{ t.function.name }} = (_: {\n"
        "{% for name, schema in (t.function.parameters.properties or {}) | items %}{{ name }}: {{ schema.type }}"
        "{% if schema.enum and schema.default is defined %}{{ ', // default: ' + schema.default }}{% endif %},\n"
        "{% endfor %}}) => any;\n{% endfor %}<|end|>{% endif %}{% set call = namespace(name=none) %}"
        "{% set answer = namespace(last=-1) %}{% for m in turns %}{% if m.role == 'assistant' and not m.tool_calls %}"
        "{% set answer.last = loop.index0 %}{% endif %}{% endfor %}{% for m in turns %}"
        "{% if m.role == 'tool' %}{% if call.name is none %}{{ raise_exception('Message has tool role') }}{% endif %}"
        "<|start|>functions.{{ call.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
        "{% elif m.role == 'assistant' and m.tool_calls %}"
        "{% if m.content and m.thinking %}{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}"
        "{% if (m.content or m.thinking) and loop.index0 > answer.last %}"
        "<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>{% endif %}"
        "{% set call.name = m.tool_calls[0].function.name %}<|start|>assistant to=functions.{{ call.name }}"
        "<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
        "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
        "{% set call.name = none %}{% elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
    "Gemma 4": (  # results stand in the turn of the call, before its text
        "{% set turns = messages[1:] if messages[0].role == 'system' else messages %}"
        "{% if tools or messages[0].role == 'system' %}<|turn>system\n{{ messages[0].content if messages[0].role == "
        "'system' }}{% for t in tools or [] %}<|tool>declaration:{{ t.function.name }}<tool|>{% endfor %}<turn|>\n"
        "{% endif %}{% set last = namespace(user=-1, open=false) %}{% for m in turns %}{% if m.role == 'user' %}"
        "{% set last.user = loop.index0 %}{% endif %}{% endfor %}{% for m in turns %}{% if m.role == 'tool' %}"
        '<|tool_response>response:f{value:<|"|>{{ m.content }}<|"|>}<tool_response|>{% else %}'
        "{% if not last.open or m.role != 'assistant' %}"
        "<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{% endif %}"
        "{% if m.reasoning_content and loop.index0 > last.user and m.tool_calls %}"
        "<|channel>thought\n{{ m.reasoning_content }}\n<channel|>{% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name + '{' }}"
        "{% for key, value in c.function.arguments | dictsort %}{{ key }}:"
        "{{ '<|\"|>' + value + '<|\"|>' if value is string else value | tojson }}{{ \",\" if not loop.last }}"
        "{% endfor %}}<tool_call|>{% endfor %}{% set last.open = m.tool_calls is defined %}"
        "{{ '<turn|>\n' if not last.open }}{% endif %}{% endfor %}{% if add_generation_prompt and not last.open %}"
        "<|turn>model\n{{ '<|channel>thought\n<channel|>' if not enable_thinking }}{% endif %}"
    ),
    "DeepSeek V3": (  # shows all system messages first, and no tools; arguments are texts
        "{% for m in messages if m.role == 'system' %}{{ m.content + '\n\n' }}{% endfor %}{% for m in messages %}"
        "{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.role == 'assistant' %}"  # noqa: RUF001
        "<｜Assistant｜>{{ m.content.split('</think>')[-1] }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>"  # noqa: RUF001
        ""
        "{% for c in m.tool_calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}\n```json\n"  # noqa: RUF001
        "{{ c.function.arguments + '' }}\n```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}"  # noqa: RUF001
        "<｜end▁of▁sentence｜>{% elif m.role == 'tool' %}"  # noqa: RUF001
        "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% endif %}{% endfor %}"  # noqa: RUF001
        "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"  # noqa: RUF001
    ),
    "Llama 3": (  # describes tools in the first question; one call in a message, without its text
        "{% set turns = messages[1:] if messages[0].role == 'system' else messages %}"
        "<|start_header_id|>system<|end_header_id|>\n\n"
        "{{ messages[0].content if messages[0].role == 'system' }}"
        "<|eot_id|>{% if tools %}{% if not turns %}{{ raise_exception('there is no first user message') }}{% endif %}"
        "<|start_header_id|>user<|end_header_id|>\n\nRespond in the format "
        '{"name": function name, "parameters": dictionary of argument name and its value}.'
        "{% for t in tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}{{ turns[0].content }}<|eot_id|>"
        "{% set turns = turns[1:] %}{% endif %}{% for m in turns %}{% if m.tool_calls %}"
        "{% if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls') }}{% endif %}"
        "{% set f = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n\n"
        '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<|eot_id|>{% elif m.role == \'tool\' %}'
        "<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>{% else %}"
        "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "Mistral": (  # describes tools before the last question; ids of nine characters; questions and answers alternate
        "{% set turns = messages[1:] if messages[0].role == 'system' else messages %}"
        "{% set n = namespace(turn=0, last=0) %}{% for m in turns %}{% if not (m.role == 'tool' or m.tool_calls) %}"
        "{% if (m.role == 'user') != (n.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% set n.turn = n.turn + 1 %}{% endif %}{% if m.role == 'user' %}{% set n.last = loop.index0 %}{% endif %}"
        "{% endfor %}[SYSTEM_PROMPT]{{ messages[0].content if messages[0].role == 'system' else 'You are Mistral.' }}"
        "[/SYSTEM_PROMPT]{% for m in turns %}{% if m.role == 'user' %}{% if tools and loop.index0 == n.last %}"
        "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]"
        "{% elif m.tool_calls %}{% for c in m.tool_calls %}"
        ""
        "{% if c.id | length != 9 %}{{ raise_exception('IDs') }}{% endif %}"
        "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>"
        "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% elif m.role == 'tool' %}"
        "{% if m.tool_call_id | length != 9 %}{{ raise_exception('IDs') }}{% endif %}"
        "[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]"
        "{% else %}{{ raise_exception('Only user, assistant and tool') }}{% endif %}{% endfor %}"
    ),
}
# the models' own templates, from a package that `make clients` fetches
FETCHED = Path(__file__).parents[2] / ".clients" / "chat_templates"
FETCHED_NAMES = {
    "Qwen 2.5": "Qwen-Qwen2.5-7B-Instruct",
    "Qwen 3": "Qwen-Qwen3-0.6B",
    "Qwen 3.5": "Qwen3.5-4B",
    "SmolLM3": "HuggingFaceTB-SmolLM3-3B",
    "GLM 4": "GLM-4.6",
    "gpt-oss": "openai-gpt-oss-120b",
    "Gemma 4": "google-gemma-4-31B-it",
    "DeepSeek V3": "deepseek-ai-DeepSeek-V3.1",
    "Llama 3": "meta-llama-Llama-3.1-8B-Instruct",
    "Mistral": "Mistral-Small-3.2-24B-Instruct-2506",
}


def fetched(family: str) -> str | None:
    """The template of a model of this family; None if it is not on this machine."""
    file = FETCHED / f"{FETCHED_NAMES[family]}.jinja"
    return file.read_text(encoding="utf-8") if file.is_file() else None
