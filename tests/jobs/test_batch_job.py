"""A job answers every line once, with the text of `generate`; a refused line does not stop the others."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.jobs import batch_job
from slipstream.jobs.line_formats import seed_of
from tests.support import tiny_models
from tests.support.job_cases import by_id, chat, counts, read, requests, toy, write


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return toy()


def test_every_answer_of_a_job_equals_plain_decoding_of_its_request_alone(
    decoder: SpeculativeDecoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_job, "WINDOW", 8)  # several windows
    lines, plain = requests(30), toy(drafter="none", max_batch_size=1)
    report = decoder.batch(write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", SamplingParams(top_k=9))
    assert counts(report) == (30, 0, 30, 0) and report.work.accepted_tokens > 0
    answers = {line["id"]: line for line in read(tmp_path / "out.jsonl")}
    assert set(answers) == {line["id"] for line in lines}
    for line in lines:
        wanted = {name: value for name, value in line.items() if name not in ("id", "prompt")}
        params = SamplingParams(**{"seed": seed_of(line["id"]), "top_k": 9} | wanted)
        alone = plain.generate(line["prompt"], params)
        texts = [answers[line["id"]], *answers[line["id"]].get("alternatives", [])]
        assert [text["text"] for text in texts] == [alone.text, *(other.text for other in alone.alternatives)]
        assert [text["seed"] for text in texts] == [alone.seed, *(other.seed for other in alone.alternatives)]
        assert texts[0]["output_tokens"] == len(alone.token_ids)
        assert texts[0]["finish_reason"] == alone.finish_reason


@pytest.mark.slow
def test_order_batch_size_and_drafter_do_not_change_a_byte(tmp_path: Path) -> None:
    lines = [*requests(14), chat("c", "The heron", temperature=0.9), chat("d", "A sparrow", logprobs=True)]
    toy().batch(lines, tmp_path / "one.jsonl")
    random.Random(1).shuffle(lines)
    toy(drafter="none", max_batch_size=2).batch(lines, tmp_path / "two.jsonl")
    assert by_id(tmp_path / "one.jsonl") == by_id(tmp_path / "two.jsonl")
    for line in lines:  # negative control: other ids give other seeds
        line.pop("seed", None)
        line["custom_id" if "body" in line else "id"] += "'"
    toy().batch(lines, tmp_path / "three.jsonl")
    texts = [[line["text"] for line in read(tmp_path / f"{name}.jsonl") if "text" in line] for name in ("one", "three")]
    assert sorted(texts[0]) != sorted(texts[1])


def test_an_answer_in_openais_format_equals_the_servers_without_times_and_metrics(
    decoder: SpeculativeDecoder, tmp_path: Path
) -> None:
    lines = [
        chat("a", "The heron", temperature=0),
        {"custom_id": "b", "url": "/v1/completions", "body": {"prompt": ["The h", "A s"], "temperature": 0, "n": 1}},
        {
            "custom_id": "c",
            "url": "/v1/completions",
            "body": {"prompt": "The", "max_tokens": 0, "echo": True, "logprobs": 1},
        },
    ]
    assert counts(decoder.batch(lines, tmp_path / "out.jsonl")) == (3, 0, 3, 0)
    responses = {line["custom_id"]: line["response"] for line in read(tmp_path / "out.jsonl")}
    assert {entry["status_code"] for entry in responses.values()} == {200}
    body = responses["a"]["body"]
    alone = decoder.generate("The heron", SamplingParams(max_tokens=12))
    assert body["choices"][0]["message"]["content"] == alone.text and body["object"] == "chat.completion"
    assert body["created"] == 0 and not {"timings", "metrics"} & set(body)
    assert set(body["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens"}
    assert [entry["index"] for entry in responses["b"]["body"]["choices"]] == [0, 1]
    scored = responses["c"]["body"]["choices"][0]
    assert scored["text"] == "The" and scored["logprobs"]["token_logprobs"][0] is None
    assert len(scored["logprobs"]["token_logprobs"]) == 3


REFUSED = [
    ("{", "not JSON: Expecting property name enclosed in double quotes at character 2; allowed: one JSON object"),
    ('{"id": "s', "not JSON: Unterminated string starting at character 8; allowed: one JSON object"),
    ("[1]", "[1]; allowed: one JSON object"),
    ("null", "null; allowed: one JSON object"),
    ('{"id": "n", "prompt": "x", "temperature": NaN}', "not JSON: NaN is not a JSON number"),
    ({"id": "r1", "prompt": "again"}, "id 'r1' is that of line 1; allowed: an id for each line"),
    ({"prompt": "x"}, "no id; allowed: a string of 1 to 512 characters, or a whole number"),
    ({"id": True, "prompt": "x"}, "id=True; allowed:"),
    ({"id": "p"}, "no prompt; allowed: a string, token ids or a list of chat messages"),
    ({"id": "e", "prompt": ""}, "prompt is empty; allowed: at least one token"),
    ({"id": "i", "prompt": [999]}, "prompt: token id 999; allowed: 0 to 256"),
    ({"id": "t", "prompt": "x", "temperature": -1}, "temperature=-1; allowed: a number, 0 or more"),
    ({"id": "u", "prompt": "x", "temprature": 1}, "unknown option 'temprature'; allowed: temperature,"),
    ({"id": "m", "prompt": "x", "model": "gpt-9"}, "model='gpt-9'; allowed: the loaded 'toy', or no model"),
    ({"id": "h", "prompt": "x", "chat": 1}, "chat=1; allowed: true, false"),
    ({"id": "b", "prompt": "x", "logit_bias": {"a": 1}}, "logit_bias: 'a'; allowed: token ids"),
    ({"id": "k", "prompt": "x", "constraint": {"rule": 1}}, "constraint={'rule': 1}; allowed: one of json_schema"),
    (
        {"id": "j", "prompt": "x", "json_schema": {"type": "object"}},
        'unknown option \'json_schema\'; allowed: "constraint": {"json_schema": ...}, or another of its kinds: json_o',
    ),
    ({"id": "l", "prompt": "x", "logits_processors": []}, "logits_processors in a line; allowed: other options"),
    (chat("o1", "x", model="gpt-9"), "model 'gpt-9' is not served here; allowed: 'toy'"),
    (chat("o2", "x", temperature=-1), "temperature=-1; allowed: a number from 0 to 100"),
    (chat("o3", "x", stream=True), "stream=true in a batch; allowed: false"),
    (chat("o4", "x") | {"url": "/v1/embeddings"}, "url='/v1/embeddings'; allowed: /v1/chat/completions, /v1/c"),
    (chat("o5", "x") | {"method": "GET"}, "method='GET'; allowed: 'POST'"),
    (chat("o6", "x") | {"prompt": "x"}, "unknown field 'prompt'; allowed: custom_id, method, url, body"),
    ({"custom_id": "o7", "url": "/v1/completions"}, "body is missing; allowed: a JSON object, the request"),
    (chat("o8", "x", slipstream={"rounds": True}), "slipstream: rounds are not reported in a batch"),
]  # fmt: skip


def test_a_bad_line_is_reported_with_its_number_and_the_others_are_answered(
    decoder: SpeculativeDecoder, tmp_path: Path
) -> None:
    good = {"id": "r1", "prompt": "The heron", "max_tokens": 4}
    source = write(tmp_path / "in.jsonl", [good, *(line for line, _ in REFUSED), "", {**good, "id": 7}])
    report = decoder.batch(source, tmp_path / "out.jsonl")
    assert counts(report) == (len(REFUSED) + 2, 0, 2, len(REFUSED)) and report.remaining == 0
    assert set(by_id(tmp_path / "out.jsonl")) == {"r1", "7"}
    failures = {line["line"]: line for line in read(tmp_path / "out.errors.jsonl")}
    assert sorted(failures) == list(range(2, len(REFUSED) + 2))
    for number, (line, why) in enumerate(REFUSED, 2):
        error = failures[number]["error"]
        if isinstance(line, dict) and "custom_id" in line:
            assert failures[number]["custom_id"] == line["custom_id"]
            assert failures[number]["response"]["status_code"] >= 400
            error = error["message"]
        assert error.startswith(why), error
    assert report.errors[0] == f"{source}, line 2: {REFUSED[0][1]}"


def test_a_row_that_fails_fails_alone_and_is_retried_by_the_next_run(
    decoder: SpeculativeDecoder, tmp_path: Path
) -> None:
    banned = {str(token): -1e9 for token in range(257)}
    lines = [{"id": "good", "prompt": "The", "max_tokens": 3}, {"id": "bad", "prompt": "x", "logit_bias": banned}]
    lines[1]["logit_bias"] = {name: float("-inf") for name in banned}
    first = decoder.batch(lines, tmp_path / "out.jsonl")
    second = decoder.batch(lines, tmp_path / "out.jsonl")
    assert (counts(first), counts(second)) == ((2, 0, 1, 1), (2, 1, 0, 1))
    assert [line["id"] for line in read(tmp_path / "out.errors.jsonl")] == ["bad"]
    del lines[1]
    with pytest.raises(UsageError, match="allowed"):
        decoder.batch(lines[:0], tmp_path / "out.jsonl")
    assert decoder.batch(lines, tmp_path / "out.jsonl").failed == 0
    assert not (tmp_path / "out.errors.jsonl").exists()


def test_a_line_nested_too_deeply_is_refused_alone(decoder: SpeculativeDecoder, tmp_path: Path) -> None:
    deep = {str(depth): "[" * depth + "]" * depth for depth in (199, 200, 980, 5000)}  # the line adds one level
    lines = [f'{{"id": "{name}", "prompt": "x", "extra": {lists}}}' for name, lists in deep.items()]
    lines.append(json.dumps({"id": "text", "prompt": "[" * 300, "max_tokens": 2}))
    report = decoder.batch(write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    too_deep = "lists and objects are nested too deeply; allowed: at most 200 levels"
    assert counts(report) == (5, 0, 1, 4) and "unknown option 'extra'" in report.errors[3]
    assert [error.partition("line ")[2] for error in report.errors[:3]] == [f"{at}: {too_deep}" for at in (2, 3, 4)]
    listed = [{"id": name, "prompt": "x", "extra": json.loads(lists)} for name, lists in list(deep.items())[:2]]
    report = decoder.batch([*listed, {"id": "text", "prompt": "x", "max_tokens": 2}], tmp_path / "listed.jsonl")
    assert counts(report) == (3, 0, 1, 2) and report.errors[0] == f"the list of requests, line 2: {too_deep}"


def test_a_dictionary_that_is_not_json_is_refused_alone(decoder: SpeculativeDecoder, tmp_path: Path) -> None:
    lines = [{"id": "a", "prompt": object()}, {"id": "b", "prompt": "x", "max_tokens": 2}, ["c"]]
    report = decoder.batch(lines, tmp_path / "out.jsonl")
    assert counts(report) == (3, 0, 1, 2)
    assert report.errors[0].startswith("the list of requests, line 1: not JSON: Object of type object is not JSON")
    assert report.errors[1] == "the list of requests, line 3: list; allowed: a dictionary"


def test_wrong_options_are_refused(decoder: SpeculativeDecoder, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(UsageError, match="seed=3 for all requests of a job; allowed: a seed per line"):
        decoder.batch(requests(2), out, SamplingParams(seed=3))
    with pytest.raises(
        UsageError, match=r"unknown option 'token_id'; allowed: errors, chat, .*; did you mean 'token_ids'"
    ):
        decoder.batch(requests(2), out, token_id=True)
    with pytest.raises(UsageError, match="line 1 is in OpenAI's format, whose requests bring their own options"):
        decoder.batch([chat("a", "x")], out, SamplingParams(top_k=3))


def test_listed_requests_may_give_token_ids_as_numbers_or_texts(decoder: SpeculativeDecoder, tmp_path: Path) -> None:
    biases: dict[str, dict[object, float]] = {"int": {101: 20.0}, "str": {"101": 20.0}, "bool": {True: 1.0}}
    biases |= {"float": {1.5: 1.0}, "negative": {-1: 1.0}, "mixed": {5: 1.0, "6": 1.0}}
    lines = [{"id": id, "prompt": "The", "max_tokens": 3, "logit_bias": bias} for id, bias in biases.items()]
    report = decoder.batch(lines, tmp_path / "out.jsonl")
    assert {line["id"]: line["text"] for line in read(tmp_path / "out.jsonl")} == {"int": "eee", "str": "eee"}
    failures = {line["id"] or "mixed": line["error"] for line in read(tmp_path / "out.errors.jsonl")}
    assert failures["bool"] == "logit_bias: True; allowed: token ids"
    assert failures["float"] == "logit_bias: 1.5; allowed: token ids"
    assert failures["negative"].startswith("logit_bias={-1: 1.0}; allowed: token ids >= 0")
    assert "not JSON" in failures["mixed"]
    assert report.failed == 4


def test_a_line_is_checked_together_with_the_options_of_its_job(decoder: SpeculativeDecoder, tmp_path: Path) -> None:
    lines = [
        {"id": "n", "prompt": "The heron", "n": 3, "max_tokens": 4},
        {"id": "m", "prompt": "The heron", "min_tokens": 201},
        {"id": "u", "prompt": "The heron", "temprature": 1},
        {"id": "b", "prompt": "The heron", "min_tokens": 206},
    ]
    report = decoder.batch(lines, tmp_path / "out.jsonl", SamplingParams(temperature=0.8, max_tokens=205))
    answers = {line["id"]: line for line in read(tmp_path / "out.jsonl")}
    assert set(answers) == {"n", "m"} and len(answers["n"]["alternatives"]) == 2 and answers["m"]["output_tokens"] > 200
    assert [error.partition("line ")[2] for error in report.errors] == [
        f"3: unknown option 'temprature'; allowed: {', '.join(vars(SamplingParams()))}; did you mean 'temperature'?",
        "4: min_tokens=206; allowed: 0 to max_tokens (205)",
    ]


def test_token_ids_and_logprobs_are_reported_on_request(decoder: SpeculativeDecoder, tmp_path: Path) -> None:
    line = {"id": "a", "prompt": "The heron", "max_tokens": 5, "logprobs": 1}
    decoder.batch([line], tmp_path / "out.jsonl", token_ids=True)
    (answer,) = read(tmp_path / "out.jsonl")
    alone = decoder.generate("The heron", SamplingParams(max_tokens=5, logprobs=1))
    assert answer["token_ids"] == alone.token_ids
    assert [entry["logprob"] for entry in answer["logprobs"]] == [entry.logprob for entry in alone.logprobs or ()]


def test_requests_may_have_constraints_and_predictions(decoder: SpeculativeDecoder, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    lines = [
        {"id": "a", "prompt": "The", "constraint": {"choice": ["stone", "fish"]}},
        {"id": "b", "prompt": "The heron", "prediction": " was slow and never wrong", "max_tokens": 20},
    ]
    assert decoder.batch(lines, tmp_path / "out.jsonl").answered == 2
    texts = {line["id"]: line["text"] for line in read(tmp_path / "out.jsonl")}
    assert texts["a"] in ("stone", "fish")
    assert texts["b"] == decoder.generate("The heron", SamplingParams(max_tokens=20)).text


def test_requests_with_a_common_prefix_run_in_sequence_and_the_longest_run_first(
    decoder: SpeculativeDecoder, tmp_path: Path
) -> None:
    from slipstream.jobs.job_lines import Line
    from slipstream.jobs.line_formats import JobOptions, LineReader
    from slipstream.wiring.run_order import first_row, ordered

    shared = "a common beginning of many characters: "
    prompts = ["long " * 30, shared + "one", "short", shared + "two and more", "long " * 20, shared + "three" * 9]
    reader = LineReader(decoder, JobOptions())
    asked = [reader.request_of(Line(at, {"id": at, "prompt": prompt})) for at, prompt in enumerate(prompts)]
    assert [request.line.number for request in ordered(asked, first_row, 1)] == [0, 4, 5, 3, 1, 2]
    assert [request.line.number for request in ordered(asked, first_row, 4096)] == [0, 4, 5, 3, 1, 2]


def test_the_report_can_be_written_as_json(decoder: SpeculativeDecoder, tmp_path: Path) -> None:
    saved = json.loads(json.dumps(decoder.batch(requests(3), tmp_path / "out.jsonl").to_dict()))
    assert saved["answered"] == 3 and saved["remaining"] == 0 and saved["work"]["output_tokens"] > 0


@pytest.mark.slow
def test_plain_lines_and_jobs_take_the_options_of_generate(tmp_path: Path) -> None:
    template = (
        "{% for t in tools or [] %}{{ t['function']['name'] }} <tool_call>{% endfor %}"
        "{% for m in messages %}{{ m.content }} {% endfor %}a{% if loud %}bc{% endif %}"
    )
    inner = tiny_models.tokenizer(list('<>_{}"/'), template)
    model = tiny_models.fresh("llama", vocab_size=len(inner))
    decoder = SpeculativeDecoder(model, tokenizer=inner, acceptance="match", drafter="ngram")
    asked = [{"role": "user", "content": "hello"}]
    answered = [*asked, {"role": "assistant", "content": "yes indeed"}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    forms: list[dict[str, Any]] = [
        {"messages": asked},
        {"messages": asked, "chat_template_kwargs": {"loud": False}},
        {"messages": asked, "tools": tools},
        {"prompt": answered, "continue_final_message": True},
    ]
    out = tmp_path / "out.jsonl"
    lines = [{"id": f"r{i}", "seed": i, "temperature": 1.0} | form for i, form in enumerate(forms)]
    report = decoder.batch(lines, out, max_tokens=3, chat_template_kwargs={"loud": True}, token_ids=True)
    assert counts(report) == (4, 0, 4, 0), report.errors
    answers = {line["id"]: line for line in read(out)}
    for i, form in enumerate(forms):
        options = {"chat_template_kwargs": {"loud": True}} | form
        prompt = options.pop("messages", None) or options.pop("prompt")
        expected = decoder.generate(prompt, max_tokens=3, temperature=1.0, seed=i, **options)
        assert answers[f"r{i}"]["token_ids"] == expected.token_ids
        assert answers[f"r{i}"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert answers["r2"]["tool_calls"] == [] and "tool_calls" not in answers["r0"]
    assert len({answer["prompt_tokens"] for answer in answers.values()}) == 4

    wrong = [
        ({"messages": "hello"}, "messages='hello'; allowed: a list of chat messages"),
        ({"messages": asked, "prompt": "x"}, "prompt and messages are both given"),
        ({"prompt": [5], "continue_final_message": True}, "continue_final_message with token ids"),
        ({"messages": asked, "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs: 'x'; allowed: loud"),
        ({"messages": asked, "tools": [1]}, "tool 0 is 1; allowed"),
    ]
    report = decoder.batch([{"id": str(i)} | line for i, (line, _) in enumerate(wrong)], tmp_path / "wrong.jsonl")
    assert report.failed == len(wrong)
    for message, (_, why) in zip(report.errors, wrong, strict=True):
        assert why in message
    with pytest.raises(UsageError, match="chat_template_kwargs=3; allowed: a dictionary"):
        decoder.batch(lines, tmp_path / "x.jsonl", chat_template_kwargs=3)
    with pytest.raises(UsageError, match="params and max_tokens= are both given"):
        decoder.batch(lines, tmp_path / "x.jsonl", SamplingParams(), max_tokens=3)
