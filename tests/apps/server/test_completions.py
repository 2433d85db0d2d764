"""`POST /v1/completions`: every form of prompt, and log-probabilities as evaluation harnesses read them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slipstream import SamplingParams
from tests.support.markers import subcases
from tests.support.running_server import RunningServer, toy


def alone(prompt: Any, **options: Any) -> str:
    """The text of plain decoding."""
    return toy(drafter="none", num_draft_tokens="auto").generate(prompt, SamplingParams(**options), chat=False).text


def test_a_completion_equals_the_decoders_text(server: RunningServer) -> None:
    assert server.text(temperature=0, max_tokens=60) == alone("A heron", max_tokens=60)
    assert server.text(temperature=0.9, seed=7, max_tokens=60) == alone(
        "A heron", temperature=0.9, seed=7, max_tokens=60
    )


def test_openais_defaults_are_sampling_and_sixteen_tokens(server: RunningServer) -> None:
    answer = server.complete(seed=3).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["text"] == alone("A heron", temperature=1.0, seed=3, max_tokens=16)


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("The wind", ["The wind"]),
        (["The wind", "A fish"], ["The wind", "A fish"]),
        ([*b"The wind"], ["The wind"]),
        ([[*b"The wind"], [*b"A fish"]], ["The wind", "A fish"]),
    ],
)
def test_prompts_are_read_in_every_form(server: RunningServer, prompt: Any, texts: list[str]) -> None:
    answer = server.complete(prompt, temperature=0, max_tokens=12).json()
    assert [choice["text"] for choice in answer["choices"]] == [alone(text, max_tokens=12) for text in texts]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, texts))


def test_choices_are_numbered_prompt_by_prompt(server: RunningServer) -> None:
    answer = server.complete(["The wind", "A fish"], n=2, seed=5, max_tokens=9).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in answer["choices"]]
    for at, prompt in enumerate(("The wind", "A fish")):
        result = toy().generate(prompt, SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=9), chat=False)
        assert texts[2 * at : 2 * at + 2] == [result.text, result.alternatives[0].text]
    assert answer["usage"]["prompt_tokens"] == len("The wind") + len("A fish")


def test_cached_tokens_are_summed_over_all_prompts(server: RunningServer) -> None:
    prompts = ["first " * 9, "second " * 9]
    first, second = (server.complete([prompt], max_tokens=2).json()["usage"] for prompt in prompts)
    again = server.complete(prompts, max_tokens=2, n=2).json()["usage"]
    assert again["prompt_tokens"] == first["prompt_tokens"] + second["prompt_tokens"]
    assert again["prompt_tokens_details"]["cached_tokens"] > first["prompt_tokens"]


def test_an_echo_repeats_the_prompt_after_truncation(server: RunningServer) -> None:
    for prompt in ("A heron", [*b"A heron"]):
        cut = {"truncate_prompt_tokens": 5, "echo": True, "logprobs": 1, "max_tokens": 0}
        choice = server.complete(prompt, **cut).json()["choices"][0]
        assert choice["text"] == "heron" == "".join(choice["logprobs"]["tokens"])
    assert server.text(truncate_prompt_tokens=99, echo=True, max_tokens=0) == "A heron"


def test_greedy_choices_are_equal(server: RunningServer) -> None:
    texts = [c["text"] for c in server.complete(n=3, temperature=0).json()["choices"]]
    assert len(texts) == 3 and len(set(texts)) == 1


def test_stop_strings_cut_the_text(server: RunningServer) -> None:
    answer = server.complete(temperature=0, max_tokens=80, stop=["sparrow", "zzz"]).json()["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert answer["text"] == alone("A heron", max_tokens=80).partition("sparrow")[0]


def test_many_stop_strings_are_allowed(server: RunningServer) -> None:
    assert server.complete(stop=[f"no {n}" for n in range(32)]).status_code == 200


def test_vllms_options_are_read_at_the_top_level(server: RunningServer) -> None:
    options = {"top_k": 3, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 4, "bad_words": ["sparrow"]}
    fields = {"temperature": 1.0, "seed": 2, "max_tokens": 40}
    expected = alone("A heron", **fields, **options)
    assert server.text(**fields, **options, top_p=1, stop_token_ids=[]) == expected
    assert server.text(**fields) != expected


def test_only_allowed_tokens_are_chosen(server: RunningServer) -> None:
    text = server.text(allowed_token_ids=[*b"abc"], max_tokens=30, seed=1)
    assert len(text) == 30 and set(text) <= set("abc")


def test_logit_bias_has_token_ids_as_texts(server: RunningServer) -> None:
    assert server.text(logit_bias={str(ord("z")): 100}, max_tokens=5) == "zzzzz"


def test_token_ids_are_returned_on_request(server: RunningServer) -> None:
    choice = server.complete(return_token_ids=True, temperature=0).json()["choices"][0]
    assert bytes(choice["token_ids"]).decode() == choice["text"] and choice["prompt_token_ids"] == [*b"A heron"]


def harness(choice: dict[str, Any], context: int) -> tuple[float, bool]:
    """A continuation's log-probability, and whether it is the greedy one, as lm-eval computes them."""
    reported = choice["logprobs"]
    logprobs = reported["token_logprobs"][context:-1]
    greedy = True
    for logprob, top in zip(logprobs, reported["top_logprobs"][context:-1], strict=True):
        greedy &= logprob == max(top.values())
    return sum(logprobs), greedy


def test_echoed_prompts_are_scored_as_evaluation_harnesses_read_them(server: RunningServer) -> None:
    prompt = [*b"A heron and a sparrow"]
    likeliest = alone("A heron and a sparrow", max_tokens=12).encode()
    good, bad = [*prompt, *likeliest], [*prompt, *likeliest[:3], ord("#"), *likeliest[4:]]
    answer = server.complete([good, bad], echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234).json()
    for ids, choice in zip((good, bad), answer["choices"], strict=True):
        reported = choice["logprobs"]
        assert {len(part) for part in reported.values()} == {len(ids) + 1}
        assert reported["token_logprobs"][0] is None and reported["top_logprobs"][0] is None
        assert reported["tokens"][:-1] == [chr(i) for i in ids] and reported["text_offset"] == [*range(len(ids) + 1)]
        assert choice["text"].startswith(bytes(ids).decode())
    (likely, greedy), (unlikely, other) = (harness(c, len(prompt)) for c in answer["choices"])
    assert greedy and not other and likely > unlikely + 5


def test_an_echo_has_the_log_probabilities_of_the_generated_text(server: RunningServer) -> None:
    for _ in range(2):  # the second time everything is cached, and must still be scored
        answer = server.complete(temperature=1.0, seed=4, max_tokens=90, logprobs=3, return_token_ids=True).json()
        choice = answer["choices"][0]
        ids = [*b"A heron", *choice["token_ids"]]
        echoed = server.complete(ids, echo=True, logprobs=3, max_tokens=0).json()
        assert echoed["usage"]["completion_tokens"] == 0
        again = echoed["choices"][0]["logprobs"]
        assert again["token_logprobs"][7:] == choice["logprobs"]["token_logprobs"]
        assert again["top_logprobs"][7:] == choice["logprobs"]["top_logprobs"]


def test_a_chosen_token_is_always_among_those_reported(server: RunningServer) -> None:
    for count in (0, 1, 2):
        reported = server.complete(seed=8, temperature=1.5, max_tokens=60, logprobs=count).json()["choices"][0][
            "logprobs"
        ]
        entries = zip(reported["tokens"], reported["token_logprobs"], reported["top_logprobs"], strict=True)
        assert all(top[token] == logprob for token, logprob, top in entries)


def test_tokens_are_named_by_id_on_request(server: RunningServer) -> None:
    answer = server.complete(temperature=0, max_tokens=2, logprobs=1, return_tokens_as_token_ids=True).json()
    assert all(name.startswith("token_id:") for name in answer["choices"][0]["logprobs"]["tokens"])


def test_a_stream_gives_the_whole_text(server: RunningServer) -> None:
    fields = {"prompt": "A heron", "temperature": 0, "max_tokens": 70, "echo": True, "logprobs": 1}
    whole = server.complete(**fields).json()["choices"][0]
    chunks = server.chunks("/v1/completions", fields | {"stream_options": {"include_usage": True}})
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == whole["text"]
    parts = [c["choices"][0]["logprobs"] for c in chunks[:-1]]
    for name in whole["logprobs"]:
        assert [entry for part in parts for entry in part[name]] == whole["logprobs"][name]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 70
    assert all(c["usage"] is None for c in chunks[:-1])


@subcases(
    "fields, param",
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["x", [1]]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": ["x"] * 129}, "n"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e308}, "temperature"),
        ({"n": True}, "n"),
        ({"echo": 1}, "echo"),
        ({"prompt": [True]}, "prompt"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias"),
        ({"num_draft_tokens": 65}, "num_draft_tokens"),
        ({"min_tokens": 20}, "min_tokens"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"allowed_token_ids": [300]}, "allowed_token_ids"),
    ],
)
def test_invalid_fields_are_refused_by_name(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    body = json.dumps({"prompt": "x"} | fields)
    answer = server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and error["param"].startswith(param)
    assert "\n" not in error["message"] and len(error["message"]) < 400


def test_a_request_that_allows_no_token_is_refused(server: RunningServer) -> None:
    bias = {str(n): -10000.0 for n in range(256)}
    assert server.complete(logit_bias=bias, temperature=0).status_code == 200  # -10000 is small, not impossible
    words = {"allowed_token_ids": [97], "bad_words": ["a"]}
    answer = server.complete(**words)
    assert answer.status_code == 400 and "no token" in answer.json()["error"]["message"]
    assert server.complete().status_code == 200
