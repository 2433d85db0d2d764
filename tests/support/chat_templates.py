"""Small chat templates, each with a trap of a real one, and the real ones that are on this machine."""

from __future__ import annotations

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


def decoder_without_tools() -> SpeculativeDecoder:
    """A tiny model whose template reads no tools."""
    tokenizer = tiny_models.byte_tokenizer(TEMPLATES["no tools"])
    model = tiny_models.fresh("llama", vocab_size=len(tokenizer), max_position_embeddings=4096, eos_token_id=1)
    settings: dict[str, Any] = {"drafter": "suffix", "num_draft_tokens": 4, "acceptance": "match"}
    return SpeculativeDecoder(model, tokenizer=tokenizer, **settings)
