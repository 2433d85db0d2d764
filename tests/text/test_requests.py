"""Prompts in every form that callers and tokenizers use, and the errors for other forms."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.text.requests import read_prompts, texts_shown
from slipstream.tokenization.hf_tokenizer import HFTokenizer
from tests.support.markers import subcases
from tests.support.tiny_models import prompts, shared, tokenizer

IDS, OTHER = [5, 6, 7, 8], [9, 10]
ONE: dict[str, Any] = {
    "list": IDS,
    "tuple": tuple(IDS),
    "numpy ints in a list": list(np.array(IDS)),
    "tensor": torch.tensor(IDS),
    "tensor [1, n]": torch.tensor([IDS]),
    "int32 tensor": torch.tensor(IDS, dtype=torch.int32),
    "array": np.array(IDS),
    "array [1, n]": np.array([IDS], dtype=np.int32),
    "encoding": BatchEncoding({"input_ids": IDS, "attention_mask": [1] * 4}),
    "encoding of tensors": BatchEncoding({"input_ids": torch.tensor([IDS]), "attention_mask": torch.ones(1, 4)}),
    "dict": {"input_ids": torch.tensor([IDS])},
}
SEVERAL: dict[str, Any] = {
    "lists": [IDS, OTHER],
    "tensors": [torch.tensor(IDS), torch.tensor([OTHER])],
    "encodings": [BatchEncoding({"input_ids": IDS}), {"input_ids": np.array(OTHER)}],
    "padded left": {
        "input_ids": torch.tensor([IDS, [0, 0, *OTHER]]),
        "attention_mask": torch.tensor([[1] * 4, [0, 0, 1, 1]]),
    },
    "padded right": {"input_ids": np.array([IDS, [*OTHER, 0, 0]]), "attention_mask": np.array([[1] * 4, [1, 1, 0, 0]])},
    "not padded": BatchEncoding({"input_ids": [IDS, OTHER], "attention_mask": [[1] * 4, [1, 1]]}),
}


@subcases("form", ONE)
def test_one_prompt_is_read_in_every_form(form: str) -> None:
    prompts = read_prompts(ONE[form])
    assert prompts.items == [IDS] and prompts.single and all(type(token) is int for token in prompts.items[0])


@subcases("form", SEVERAL)
def test_several_prompts_are_read_in_every_form(form: str) -> None:
    prompts = read_prompts(SEVERAL[form])
    assert prompts.items == [IDS, OTHER] and not prompts.single


@subcases(
    "prompt, message",
    [
        (torch.tensor([1.0, 2.0]), "^prompt is an array of float32; allowed: whole numbers"),
        (np.array([True]), "^prompt is an array of bool; allowed: whole numbers"),
        (torch.tensor(3), r"^prompt has shape \(\); allowed: \(n,\) or \(1, n\)"),
        (torch.ones(1, 2, 3, dtype=torch.int64), r"^prompt has shape \(1, 2, 3\); allowed"),
        (torch.ones(0, dtype=torch.int64), "^prompt .*; allowed"),
        ([torch.tensor([IDS, IDS])], "^prompt 0 holds 2 prompts; allowed: one per item"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, "^attention_mask and input_ids differ in shape"),
        ({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]]}, "^attention_mask: row 0 has padding inside"),
        ({"input_ids": [[0, 0]], "attention_mask": [[0, 0]]}, "^prompt .*; allowed"),
        ({"input_ids": "text"}, "^input_ids='text'; allowed: token ids"),
        ({"input_ids": None}, "^input_ids=None; allowed: token ids"),
        ({"input_ids": 5}, "^input_ids=5; allowed: token ids"),
        ({"input_ids": [IDS], "attention_mask": 5}, "^attention_mask=5; allowed: token ids"),
        (torch.ones(2, dtype=torch.int64, device="meta"), "^prompt cannot be read .*; allowed: whole numbers"),
        (torch.tensor(IDS).to_sparse(), "^prompt cannot be read .*; allowed: whole numbers"),
        (
            BatchEncoding({"input_ids": [IDS], "pixel_values": torch.ones(1, 3, 2, 2)}),
            "^prompt has 'pixel_values'; allowed: text only",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, {"type": "image", "url": "x"}]}],
            "^message 0, part 1 is an image, but model .* sees none: it reads text only; allowed: text parts",
        ),
        ([{"role": "user", "content": "hi"}, {"content": "x"}], "^message 1 has the role None; allowed: a name"),
        ([{"role": 5, "content": "hi"}], "^message 0 has the role 5; allowed: a name"),
        (
            [{"role": "user", "content": "hi"}, "and"],
            "^message 1 is a str; allowed: a dictionary with role and content",
        ),
        ([{"role": "user"}], "^message 0 has nothing but a role; allowed: with content, or with tool_calls"),
        ("a\ud800b", r"^prompt has '\\ud800' at character 1; allowed: valid Unicode"),
        (["fine", "\udcff"], r"^prompt has '\\udcff' at character 0; allowed: valid Unicode"),
        ([{"role": "user", "content": "\udcff"}], r"^prompt \(a chat message\) has '\\udcff'"),
    ],
)
def test_invalid_prompts_are_refused_in_one_line(prompt: Any, message: str) -> None:
    decoder = SpeculativeDecoder(shared("llama"), tokenizer=tokenizer(), drafter="none")
    with pytest.raises(UsageError, match=message) as refusal:
        decoder.generate(prompt, SamplingParams(max_tokens=2))
    assert "\n" not in str(refusal.value)


CALL = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": CALL}, {"role": "tool", "content": "four"}],
    [{"role": "assistant", "content": None, "tool_calls": CALL}, {"role": "user", "content": "hi"}],
    [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]}],
]
WITH_CALLS = (
    "{% for m in messages %}{{ m.role }} {% if m.tool_calls %}calls {{ m.tool_calls[0].function.name }}"
    "{% elif m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{{ part.text }} {% endfor %}"
    "{% endif %}.{% endfor %}"
)


def test_messages_are_rendered_as_transformers_renders_them() -> None:
    words = tokenizer(template=WITH_CALLS)
    decoder = SpeculativeDecoder(shared("llama"), tokenizer=words, drafter="none")
    for chat in CHATS:
        expected = words(words.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))["input_ids"]
        assert decoder.generate(chat, SamplingParams(max_tokens=2)).prompt_token_ids == expected
    several = decoder.generate(CHATS, SamplingParams(max_tokens=2))
    assert [result.prompt_token_ids for result in several] == [decoder.encode(chat) for chat in CHATS]


@pytest.mark.parametrize(
    "template", ["{% for m in messages %}{{ m.content }}{% endfor %}", "{{ 'u' + messages[0].content }}"]
)
def test_a_template_that_reads_only_texts_gets_the_text_of_parts(template: str) -> None:
    words = tokenizer(extra="\n", template=template)
    decoder = SpeculativeDecoder(shared("llama"), tokenizer=words, drafter="none")
    parts, text = CHATS[2], [{"role": "user", "content": "hi\nthere"}]
    assert decoder.encode(parts) == decoder.encode(text)
    assert "hi" in words.decode(decoder.encode(parts)) and "type" not in words.decode(decoder.encode(parts))


def test_a_tokenizers_output_is_a_valid_prompt() -> None:
    words, params = tokenizer(), SamplingParams(max_tokens=5)
    words.padding_side = "left"
    decoder = SpeculativeDecoder(shared("llama"), tokenizer=words, drafter="none")
    texts = ["hello there", "abc"]
    expected = [decoder.generate(words(text)["input_ids"], params).token_ids for text in texts]
    padded = words(texts, return_tensors="pt", padding=True)
    assert padded["attention_mask"].min() == 0
    assert [result.token_ids for result in decoder.generate(padded, params)] == expected
    encoding = words(texts[0], return_tensors="pt")
    assert decoder.generate(encoding, params).token_ids == expected[0]
    assert decoder.generate(encoding["input_ids"], params).token_ids == expected[0]
    assert [token for chunk in decoder.stream(encoding, params) for token in chunk.token_ids] == expected[0]
    assert decoder.encode(encoding["input_ids"].numpy()) == words(texts[0])["input_ids"]


@subcases("options", [{"stop": ["ok", "a\ud800"]}, {"stop": "\udcff"}, {"bad_words": ["\udcff"]}])
def test_lone_surrogates_in_options_are_refused_naming_the_field(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=rf"^{next(iter(options))}: '.*\\ud.*'; allowed: non-empty strings of valid"):
        SamplingParams(**options)


@pytest.mark.slow
def test_prompts_are_read_without_transformers() -> None:
    code = (
        "import sys, torch, slipstream; d = slipstream.SpeculativeDecoder('toy');"
        "d.generate({'input_ids': torch.tensor([[65, 66]])}); sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_result_is_json_ready() -> None:
    import json

    decoder = SpeculativeDecoder(shared("llama"), tokenizer=tokenizer(), num_draft_tokens=3)
    result = decoder.generate(prompts([6])[0], SamplingParams(max_tokens=5, seed=7))
    saved = json.loads(json.dumps(result.to_dict()))
    assert saved["text"] == result.text and saved["token_ids"] == result.token_ids and saved["seed"] == 7
    assert saved["finish_reason"] == "length" and saved["stats"]["num_output_tokens"] == 5
    assert [token for round in saved["rounds"] for token in round["tokens"]] == result.token_ids
    assert saved["prompt_token_ids"] == prompts([6])[0] and "tokenizer" not in saved


@pytest.mark.parametrize(
    "prompt",
    [
        "x" * 60_000,
        [{"role": "user", "content": "x" * 60_000}],
        [{"role": "user", "content": [{"type": "text", "text": "x" * 30_000}] * 2}],
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    prompt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, lengths = HFTokenizer._ids, list[int]()
    monkeypatch.setattr(
        HFTokenizer, "_ids", lambda self, text, **more: lengths.append(len(text)) or encode(self, text, **more)
    )
    decoder = SpeculativeDecoder(shared("llama"), tokenizer=tokenizer())
    why = "prompt has 60000 characters; allowed: at most "
    with pytest.raises(UsageError, match=why):
        decoder.generate(prompt, max_tokens=3)
    lines = [{"id": "long", "prompt": prompt}, {"id": "short", "prompt": "the cat", "max_tokens": 3}]
    report = decoder.batch(lines, tmp_path / "answers.jsonl")
    assert (report.answered, report.failed) == (1, 1) and 0 < max(lengths) < 1000
    assert why in (tmp_path / "answers.errors.jsonl").read_text()


def test_what_a_template_may_leave_out_counts_for_no_length() -> None:
    messages = [{"role": "assistant", "content": "x" * 999}, {"role": "user", "content": "abc"}, {"role": "tool"}]
    assert texts_shown(messages) == ["abc"]
