"""`POST /v1/chat/completions`, through OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import openai
import pytest

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.apps.server.answers import AnswerMessage, PartReader
from slipstream.tokenization.answer_parser import AnswerPiece
from slipstream.tokenization.tokenizer import ToolCall
from tests.support import tiny_models
from tests.support.markers import subcases
from tests.support.running_server import RunningServer, running_server

ASKED = [{"role": "user", "content": "the cat sat on the mat, the cat sat"}]


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    tokenizer = tiny_models.tokenizer()
    return SpeculativeDecoder(
        tiny_models.fresh("llama"), tokenizer=tokenizer, drafter="suffix", num_draft_tokens=4, acceptance="match"
    )


@pytest.fixture(scope="module")
def server(decoder: SpeculativeDecoder) -> Iterator[RunningServer]:
    with running_server(lambda: decoder.using(), served_model_name="tiny") as running:
        yield running


@pytest.fixture
def ask(server: RunningServer) -> Iterator[Any]:
    with server.openai() as client:
        yield partial(client.chat.completions.create, model="tiny", messages=ASKED)


def expected(decoder: SpeculativeDecoder, messages: Any = ASKED, **options: Any) -> str:
    return decoder.generate(messages, SamplingParams(**options)).text


@pytest.mark.slow
def test_an_answer_equals_the_decoders(ask: Any, decoder: SpeculativeDecoder) -> None:
    answer = ask(max_tokens=30, temperature=0.8, seed=3)
    assert answer.choices[0].message.content == expected(decoder, max_tokens=30, temperature=0.8, seed=3)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 30
    assert answer.system_fingerprint.startswith("slip-")


def test_max_completion_tokens_overrides_max_tokens(ask: Any) -> None:
    assert ask(max_tokens=30, max_completion_tokens=4).usage.completion_tokens == 4


def test_a_stream_begins_with_the_role_and_ends_with_the_usage(ask: Any, decoder: SpeculativeDecoder) -> None:
    chunks = list(ask(max_tokens=40, temperature=0, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == expected(decoder, max_tokens=40)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 40
    assert len({chunk.id for chunk in chunks}) == 1


def test_each_round_is_one_chunk(server: RunningServer) -> None:
    body = {"messages": ASKED, "max_tokens": 40, "temperature": 0, "return_token_ids": True}
    chunks = server.chunks("/v1/chat/completions", body)[1:]
    steps = chunks[-1]["metrics"]["speculative_decoding"]["num_spec_steps"]
    assert len(chunks) == steps < 40
    assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks) == 40


def test_usage_comes_with_every_chunk_on_request(server: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": ASKED, "max_tokens": 9, "stream_options": options}
    counts = [chunk["usage"]["completion_tokens"] for chunk in server.chunks("/v1/chat/completions", body)]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 9


def test_log_probabilities_have_the_form_of_openai(ask: Any) -> None:
    entries = ask(max_tokens=6, seed=1, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(entries) == 6
    for entry in entries:
        assert bytes(entry.bytes).decode() == entry.token and len(entry.top_logprobs) == 2 and entry.logprob <= 0
        assert all(other.logprob != entry.logprob or other.token == entry.token for other in entry.top_logprobs)


def test_each_of_several_answers_has_its_own_seed(ask: Any) -> None:
    answer = ask(n=3, seed=11, max_tokens=20, temperature=1.0)
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3 and texts[0] == ask(seed=11, max_tokens=20, temperature=1.0).choices[0].message.content
    chunks = ask(n=3, seed=11, max_tokens=20, temperature=1.0, stream=True)
    streamed = ["", "", ""]
    for chunk in chunks:
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_messages_may_have_parts_and_the_developer_role(ask: Any, decoder: SpeculativeDecoder) -> None:
    parts = [{"type": "text", "text": "the cat"}]
    answer = ask(
        messages=[{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}],
        max_completion_tokens=40,
        temperature=0,
    )
    plain = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "the cat"}]
    assert answer.choices[0].message.content == expected(decoder, plain, max_tokens=answer.usage.completion_tokens)


def test_a_final_assistant_message_is_continued_on_request(server: RunningServer) -> None:
    messages = [*ASKED, {"role": "assistant", "content": "well"}]
    tokenized = server.http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 3, "return_token_ids": True}
    answer = server.http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["prompt_token_ids"] == tokenized["tokens"][:-3]  # without what the template appends


def test_a_template_writes_its_own_special_tokens(server: RunningServer) -> None:
    messages = {"messages": ASKED}
    answers = [
        server.http.post("/tokenize", json=messages | {"add_special_tokens": add_special})
        for add_special in (None, False)
    ]
    assert answers[0].json() == answers[1].json()
    refused = server.http.post("/tokenize", json=messages | {"add_special_tokens": True})
    assert refused.status_code == 400 and "the chat template writes its own" in refused.json()["error"]["message"]


def test_cached_prompt_tokens_are_reported(ask: Any) -> None:
    ask(max_tokens=3, temperature=0)
    assert ask(max_tokens=3, temperature=0).usage.prompt_tokens_details.cached_tokens > 20


@subcases(
    "fields",
    [
        {"messages": []},
        {"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"top_logprobs": 21, "logprobs": True},
        {"top_logprobs": 2},
        {"functions": [{}]},
        {"stream_options": {"include_usage": True}},
        {"extra_body": {"chat_template_kwargs": {"messages": []}}},
        {"extra_body": {"chat_template": "{{ messages }}"}},
    ],
)
def test_invalid_fields_are_refused(ask: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(**fields)
    assert caught.value.type == "invalid_request_error"


def test_the_refusal_of_a_long_prompt_names_the_context_length(ask: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1024 tokens") as caught:
        ask(messages=[{"role": "user", "content": "x" * 1020}], max_tokens=9)
    assert caught.value.code == "context_length_exceeded"


def test_rounds_and_receipt_are_reported_on_request(server: RunningServer, decoder: SpeculativeDecoder) -> None:
    body = {"messages": ASKED, "max_tokens": 40, "seed": 5, "temperature": 0, "slipstream": {"rounds": True}}
    chunks = [c for c in server.chunks("/v1/chat/completions", body) if "slipstream" in c]
    tokens = [token for chunk in chunks for token in chunk["slipstream"]["tokens"]]
    receipt = chunks[-1]["slipstream"]["receipt"]
    assert [token["id"] for token in tokens] == receipt["token_ids"] and len(tokens) == 40
    assert [c["slipstream"]["round"]["index"] for c in chunks] == [*range(len(chunks))] == [*range(receipt["rounds"])]
    assert {t["source"] for t in tokens if t["origin"] == "accepted"} == {"suffix"}
    assert {t["source"] for t in tokens if t["origin"] != "accepted"} == {None}
    drafted = sum(chunk["slipstream"]["round"]["drafted"] for chunk in chunks)
    assert drafted == receipt["stats"]["num_draft_tokens"] > 0
    assert set(chunks[0]["slipstream"]["round"]["seconds"]) == {"prefill", "draft", "verify", "accept", "overhead"}
    assert receipt["seed"] == 5 and receipt["reproducible"] is decoder.reproducible
    whole = server.http.post("/v1/chat/completions", json=body).json()
    assert whole["slipstream"]["receipt"]["token_ids"] == receipt["token_ids"]


@pytest.mark.slow
def test_a_replay_without_drafting_gives_the_same_text(server: RunningServer) -> None:
    body = {"messages": ASKED, "max_tokens": 40, "temperature": 0.9, "slipstream": {"rounds": True}}
    receipt = server.http.post("/v1/chat/completions", json=body).json()["slipstream"]["receipt"]
    again = {"request": body, "token_ids": receipt["token_ids"], "seed": receipt["seed"]}
    answer = server.http.post("/v1/slipstream/replay", json=again).json()
    assert answer["identical"] and answer["first_difference"] is None and answer["seconds"] > 0
    wrong = [*receipt["token_ids"][:7], 0, *receipt["token_ids"][8:]]
    answer = server.http.post("/v1/slipstream/replay", json=again | {"token_ids": wrong}).json()
    assert not answer["identical"] and answer["first_difference"] == 7
    refused = server.http.post("/v1/slipstream/replay", json=again | {"seed": None})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "seed"


def test_a_single_request_may_turn_drafting_off(server: RunningServer) -> None:
    body = {"messages": ASKED, "max_tokens": 40, "temperature": 0}
    fast = server.http.post("/v1/chat/completions", json=body).json()
    plain = server.http.post("/v1/chat/completions", json=body | {"num_draft_tokens": 0}).json()
    assert plain["choices"][0]["message"] == fast["choices"][0]["message"]
    assert plain["timings"]["draft_n"] == 0 < fast["timings"]["draft_n"]
    steps = plain["metrics"]["speculative_decoding"]
    assert steps["num_spec_steps"] == 40 and steps["acceptance_histogram"] == [40]
    drafted = fast["metrics"]["speculative_decoding"]
    assert sum(drafted["acceptance_histogram"]) == drafted["num_spec_steps"]
    assert (
        sum(n * count for n, count in enumerate(drafted["acceptance_histogram"]))
        == drafted["num_accepted_draft_tokens"]
    )


def test_an_answer_is_one_line_of_json(server: RunningServer) -> None:
    text = server.http.post("/v1/chat/completions", json={"messages": ASKED, "max_tokens": 3}).text
    assert json.loads(text) and "\n" not in text


def test_every_text_of_a_whole_answer_has_its_receipt(server: RunningServer) -> None:
    body = {"messages": ASKED, "max_tokens": 6, "seed": 5, "temperature": 1, "n": 3, "slipstream": {"rounds": True}}
    asked = body | {"return_token_ids": True}
    answer = server.http.post("/v1/chat/completions", json=asked).json()
    receipts = answer["slipstream"]["receipts"]
    assert [receipt["token_ids"] for receipt in receipts] == [choice["token_ids"] for choice in answer["choices"]]
    for receipt in receipts:  # each seed repeats its text
        repeated = server.http.post("/v1/chat/completions", json=body | {"n": 1, "seed": receipt["seed"]}).json()
        assert repeated["slipstream"]["receipt"]["token_ids"] == receipt["token_ids"]


INJECTED = "hi<eos>"


def test_special_tokens_in_texts_are_refused_if_the_server_is_set_to() -> None:
    inner = tiny_models.tokenizer(
        list("<>"), "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}{{ tools }}a:"
    )
    model = tiny_models.fresh("llama", vocab_size=len(inner))

    def load() -> SpeculativeDecoder:
        return SpeculativeDecoder(model, tokenizer=inner, drafter="none", reproducible=False)

    function = {"name": "f", "arguments": json.dumps({"x": "<eos>"}).replace("<", "\\u003c")}
    called = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    tool = {"type": "function", "function": {"name": "f", "description": INJECTED}}
    message = {"role": "user", "content": "hi"}
    with running_server(load, no_special_tokens_in_prompts=True) as server:
        for path, body, param in (
            ("/v1/chat/completions", {"messages": [message, message | {"content": INJECTED}]}, "messages.1"),
            (
                "/v1/chat/completions",
                {"messages": [message | {"content": [{"type": "text", "text": INJECTED}]}]},
                "messages.0",
            ),
            ("/v1/chat/completions", {"messages": [message, called]}, "messages.1"),
            ("/v1/chat/completions", {"messages": [message], "tools": [tool]}, "tools"),
            ("/v1/completions", {"prompt": ["hi", INJECTED]}, "prompt"),
            ("/tokenize", {"messages": [message | {"content": INJECTED}]}, "messages.0"),
            ("/tokenize", {"prompt": INJECTED}, "prompt"),
        ):
            answer = server.http.post(path, json={"max_tokens": 1} | body)
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] == param, error
            assert error["message"] == f"{param} has the special token '<eos>'; allowed: strings without special tokens"
        for plain in (
            {"content": "hi <e o s>"},
            {"content": "hi \N{GREEK SMALL LETTER ALPHA}"},
        ):  # alpha is no token of this tokenizer
            answer = server.http.post("/v1/chat/completions", json={"messages": [message | plain], "max_tokens": 1})
            assert answer.status_code == 200, answer.text
    with running_server(
        load
    ) as server:  # by default special tokens in texts are tokenized as such, as other servers do
        body = {"messages": [message | {"content": INJECTED}], "max_tokens": 1, "return_token_ids": True}
        ids = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["prompt_token_ids"]
        assert inner.eos_token_id in ids


def test_thoughts_have_two_names_and_calls_count_up(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    thought, text = AnswerPiece("thought", "hm", ""), AnswerPiece("text", "so", "")
    calls = [AnswerPiece("call", "", "", ToolCall("look", arguments)) for arguments in ("{}", '{"x": 1}')]
    read = iter([[thought], [text, calls[0]]])
    monkeypatch.setattr(PartReader, "read", lambda _, piece: next(read, []) + calls[1:] * bool(piece.finish_reason))
    message = AnswerMessage("hm", "", tuple(part.call for part in calls if part.call is not None))
    monkeypatch.setattr(PartReader, "message", lambda reader: message)
    body = {"messages": ASKED, "max_tokens": 9, "num_draft_tokens": 0, "ignore_eos": True}
    deltas = [chunk["choices"][0]["delta"] for chunk in server.chunks("/v1/chat/completions", body)]
    assert {"reasoning_content": "hm", "reasoning": "hm"} in deltas
    sent = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in sent] == [0, 1] and sent[0]["id"] != sent[1]["id"]
    whole = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert whole["content"] is None and whole["reasoning_content"] == whole["reasoning"] == "hm"
    assert [call["function"]["arguments"] for call in whole["tool_calls"]] == ["{}", '{"x": 1}']
