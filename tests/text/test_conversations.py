"""`chat`: conversations, content parts, and tools; the text is that of `generate`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.text.results import Result
from tests.support import tiny_models
from tests.support.markers import subcases

TEMPLATE = (
    "{% for t in tools or [] %}tool:{{ t['function']['name'] }} <tool_call>.{% endfor %}"
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}.{% endfor %}a:{% if loud %}x{% endif %}"
)
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "brief"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "and now"},
]
OPTIONS: Any = {"max_tokens": 16, "temperature": 0.9, "seed": 3}


def decoder_with(template: str | None, draft: Any = None) -> SpeculativeDecoder:
    inner = tiny_models.tokenizer(list('<>_{}"/17'), template)
    model = tiny_models.fresh("llama", vocab_size=len(inner))
    return SpeculativeDecoder(model, draft, tokenizer=inner, acceptance="match", num_draft_tokens=3, drafter="ngram")


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return decoder_with(TEMPLATE)


def facts(result: Result) -> tuple[Any, ...]:
    return result.text, result.token_ids, result.prompt_token_ids, result.finish_reason, result.seed


def test_chat_and_streams_give_the_text_of_generate(decoder: SpeculativeDecoder) -> None:
    for drafts in (decoder, decoder.using("none", num_draft_tokens="auto")):
        expected = facts(decoder.generate(CHAT, SamplingParams(**OPTIONS)))
        assert facts(drafts.chat(CHAT, SamplingParams(**OPTIONS))) == expected
        assert facts(drafts.chat(tuple(CHAT), **OPTIONS)) == expected
        stream = drafts.stream(CHAT, **OPTIONS)
        assert "".join(map(str, stream)) == expected[0] and facts(stream.result) == expected
    alone = [{"role": "user", "content": "hello"}]
    assert facts(decoder.chat(alone, **OPTIONS)) == facts(decoder.generate("hello", **OPTIONS))


async def _last(stream: Any) -> Result:
    async for _ in stream:
        pass
    return stream.result


@pytest.mark.parametrize("door", ["generate", "chat", "stream", "astream", "encode"])
def test_every_call_passes_its_options_to_the_template(decoder: SpeculativeDecoder, door: str) -> None:
    def rendered(messages: Any, **options: Any) -> str:
        if door == "encode":
            return decoder.decode(decoder.encode(messages, **options))
        answer: Any = getattr(decoder, door)(messages, max_tokens=4, **options)
        if door == "stream":
            list(answer)
        result = asyncio.run(_last(answer)) if door == "astream" else answer.result if door == "stream" else answer
        assert result.token_ids == decoder.generate(result.prompt_token_ids, max_tokens=4).token_ids
        return decoder.decode(result.prompt_token_ids)

    assert rendered(CHAT[1:2]) == "u:hello.a:"
    assert rendered(CHAT[1:2], chat_template_kwargs={"loud": True}) == "u:hello.a:x"
    assert rendered(CHAT[1:3], continue_final_message=True) == "u:hello.a:yes"
    assert rendered(CHAT[1:2], tools=TOOLS) == "tool:add <tool_call>.u:hello.a:"
    with pytest.raises(UsageError, match="chat_template_kwargs: 'lout'; allowed: loud; did you mean 'loud'"):
        rendered(CHAT, chat_template_kwargs={"lout": True})


def test_several_conversations_and_texts_share_the_options_of_the_template(decoder: SpeculativeDecoder) -> None:
    options: Any = {"chat_template_kwargs": {"loud": 1}, "max_tokens": 2, "temperature": 1.0, "n": 2}
    results = decoder.generate([CHAT, "hello", CHAT[1:2]], **options)
    assert [decoder.decode(result.prompt_token_ids)[-3:] for result in results] == ["a:x"] * 3
    assert results[1].alternatives[0].prompt_token_ids == results[2].prompt_token_ids
    with pytest.raises(UsageError, match="chat_template_kwargs with token ids"):
        decoder.generate([CHAT, [5, 6]], **options)


def test_content_parts_are_read_as_their_text(decoder: SpeculativeDecoder) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    whole = [{"role": "user", "content": "hello"}]
    assert facts(decoder.chat(parts, **OPTIONS)) == facts(decoder.chat(whole, **OPTIONS))
    assert decoder.encode(parts) == decoder.encode(whole)


@subcases(
    "content, message",
    [
        (
            [{"type": "image_url", "image_url": {"url": "x"}}],
            "^message 0, part 0 is an image, but model .* sees none: it reads text only; allowed: text parts$",
        ),
        ([{"type": "text"}], "^message 0 has a part without a text; allowed: "),
        (["hello"], "^message 0 has a part of type 'str'; allowed: 'text', 'image' or 'image_url'$"),
        (5, "^message 0 has the content 5; allowed: a text, or a list of text parts$"),
    ],
)
def test_parts_that_are_not_text_are_refused_in_one_line(
    decoder: SpeculativeDecoder, content: Any, message: str
) -> None:
    for ask in (decoder.chat, decoder.generate, decoder.encode):
        with pytest.raises(UsageError, match=message):
            ask([{"role": "user", "content": content}])  # type: ignore[operator]


def test_tools_are_shown_to_the_model(decoder: SpeculativeDecoder) -> None:
    asked = decoder.chat(CHAT[:2], tools=TOOLS, max_tokens=4)
    assert decoder.decode(asked.prompt_token_ids) == "tool:add <tool_call>.s:brief.u:hello.a:"
    assert asked.tool_calls == () and asked.text == decoder.generate(asked.prompt_token_ids, max_tokens=4).text
    assert decoder.decode(decoder.chat(CHAT[:2], max_tokens=4).prompt_token_ids) == "s:brief.u:hello.a:"
    constrained = SamplingParams(max_tokens=90)
    assert decoder.chat(CHAT, constrained, tools=TOOLS).prompt_token_ids != decoder.encode(CHAT)


class ForcedText:
    """A logits processor that forces one text and then the end token."""

    def __init__(self, prompt_length: int, ids: list[int]) -> None:
        self.prompt_length, self.ids = prompt_length, ids

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        place = input_ids.shape[1] - self.prompt_length
        wanted = self.ids[place] if place < len(self.ids) else 1  # <eos>
        forced = scores.new_full(scores.shape, -1e9)
        forced[:, wanted] = 0.0
        return forced


def test_tool_calls_of_an_answer_are_read(decoder: SpeculativeDecoder) -> None:
    length = len(decoder.chat(CHAT, tools=TOOLS, max_tokens=1).prompt_token_ids)
    says = ForcedText(length, decoder.encode(f"so {CALL}"))
    answer = decoder.chat(CHAT, tools=TOOLS, max_tokens=99, logits_processors=[says])
    (call,) = answer.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("add", {"x": 1}) and answer.text == f"so {CALL}"
    assert json.loads(json.dumps(answer.to_dict()))["tool_calls"][0]["name"] == "add"
    assert decoder.generate("hello", max_tokens=2).to_dict()["tool_calls"] == []
    stream = decoder.stream(CHAT, tools=TOOLS, max_tokens=99, logits_processors=[says])
    assert "".join(map(str, stream)) == answer.text and stream.result.tool_calls == answer.tool_calls


def test_alternatives_have_their_own_calls(decoder: SpeculativeDecoder) -> None:
    length = len(decoder.chat(CHAT, tools=TOOLS, max_tokens=1).prompt_token_ids)
    says = ForcedText(length, decoder.encode(CALL))
    answer = decoder.chat(CHAT, tools=TOOLS, max_tokens=99, logits_processors=[says], n=2, temperature=1.0)
    assert [call.name for other in (answer, *answer.alternatives) for call in other.tool_calls] == ["add", "add"]


@subcases(
    "template, tools, message",
    [
        (
            tiny_models.CHAT_TEMPLATE,
            TOOLS,
            "^tools, which the chat template of 'Llama.*' does not read; allowed: no tools$",
        ),
        (None, TOOLS, "^tools, which the chat template of 'Llama.*' does not read; allowed: no tools$"),
        (None, (), "no chat template"),
    ],
)
def test_tools_and_chats_without_a_suitable_template_are_refused(
    template: str | None, tools: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        decoder_with(template).chat(CHAT, tools=tools)


@pytest.mark.parametrize("is_read", [True, False])
def test_a_template_whose_calls_are_not_read_is_logged_once(is_read: bool, caplog: pytest.LogCaptureFixture) -> None:
    json_call = (
        """<tool_call>{"name": "{{ c.function.name }}", """
        """"arguments": {{ c.function.arguments | tojson }}}</tool_call>"""
    )
    xml_call = "<tool_call><function={{ c.function.name }}>{{ c.function.arguments }}</function></tool_call>"
    call = json_call if is_read else xml_call
    calls = "{% for c in m.tool_calls or [] %}" + call + "{% endfor %}"
    template = "{{ tools | length }}{% for m in messages %}{{ m.content }}" + calls + "{% endfor %}"
    asked = decoder_with(template)
    for _ in range(2):
        asked.chat(CHAT, tools=TOOLS, max_tokens=1)
    lines = [record.message for record in caplog.records if record.message.startswith("tools: this chat template")]
    assert len(lines) == (0 if is_read else 1)
