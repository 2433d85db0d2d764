"""Tokenizers read from files without transformers make the tokens that its wrapper makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from slipstream.models.weights.gguf_configuration import described
from slipstream.models.weights.gguf_file import read_header
from slipstream.tokenization.file_tokenizer import FileTokenizer
from slipstream.tokenization.hf_tokenizer import HFTokenizer
from slipstream.tokenization.tokenizer import ChatForm
from tests.support.gguf_files import byte_level, write_model

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}<end>{% endfor %}\n"
TEXTS = [
    "",
    " ",
    "Why is the sky blue?\n\n  2 + 2 = 4; naïve e\u0301 日本語 \U0001f600\t\r\n",
    "<s>a <end><think>b</think> <|im_start|>user\n<|im_end|> </s><pad>",
    "\x00\u200b\ufeff" + "word " * 50,
]
CONVERSATION = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]


def check_same(folder: Path) -> None:
    """Compare a folder's tokenizer with transformers' wrapper of the same files."""
    inner, wrapper = FileTokenizer.read(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    own, reference = HFTokenizer(inner), HFTokenizer(wrapper)
    for text in TEXTS:
        assert own.encode(text) == reference.encode(text) and own.bare(text) == reference.bare(text)
        ids = own.encode(text)
        assert own.decode(ids) == reference.decode(ids) and inner.decode(ids) == wrapper.decode(ids)
    assert own.vocabulary() == reference.vocabulary() and len(inner) == len(wrapper)
    assert own.special_ids() == reference.special_ids() != frozenset()
    assert inner.special_tokens_map == wrapper.special_tokens_map
    assert inner.all_special_tokens == wrapper.all_special_tokens
    assert inner.all_special_ids == wrapper.all_special_ids
    for name in ("bos_token_id", "eos_token_id", "unk_token_id"):
        assert getattr(inner, name) == getattr(wrapper, name)
    assert [own.bytes_of(token) for token in range(len(inner))] == [reference.bytes_of(t) for t in range(len(inner))]
    assert own.byte_tokens().texts == reference.byte_tokens().texts
    assert own.special_tokens() == reference.special_tokens() != {}
    assert own.answer_form() == reference.answer_form() and own.call_text() == reference.call_text()
    assert own.has_chat_template == reference.has_chat_template
    if own.has_chat_template:
        assert own.template_variables() == reference.template_variables()
        assert own.template_fields() == reference.template_fields()
        for form in (ChatForm(), ChatForm(opens_answer=False), ChatForm(opens_answer=False, goes_on=True)):
            assert own.chat(CONVERSATION, form) == reference.chat(CONVERSATION, form)


@pytest.mark.parametrize("begins", [True, False])
def test_a_files_tokenizer_is_that_of_transformers(
    begins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path / "cache"))
    added = {"<s>": 3, "<end>": 3, "<think>": 4, "<unused>": 1}

    def more(writer: Any) -> None:
        writer.add_chat_template(TEMPLATE)
        writer.add_bool("tokenizer.ggml.add_bos_token", begins)
        writer.add_bool("tokenizer.ggml.add_eos_token", True)

    tokenizer: Callable[[Any], None] = byte_level("llama-bpe", added, bos="<s>", eos="<end>", unknown="<unused>")
    write_model(tmp_path / "model.gguf", tokenizer=tokenizer, more=more, vocab_size=300, pad_token_id=None)
    folder = described(read_header(tmp_path / "model.gguf"))
    check_same(folder)
    ids = FileTokenizer.read(folder)("a")["input_ids"]
    assert len(ids) == 2 + begins


@pytest.mark.smollm2
def test_the_default_models_tokenizer_is_that_of_transformers() -> None:
    from slipstream.models.weights.default_model import embedded_model

    check_same(embedded_model())


def test_a_saved_tokenizer_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path / "cache"))
    write_model(tmp_path / "model.gguf", tokenizer=byte_level("qwen2", {"<end>": 3}, eos="<end>"), vocab_size=300)
    first = FileTokenizer.read(described(read_header(tmp_path / "model.gguf")))
    first.chat_template = "é\n{{ messages }}\n\n"
    first.save(tmp_path)
    second = FileTokenizer.read(tmp_path)
    assert HFTokenizer(first).digest() == HFTokenizer(second).digest()
    assert second.chat_template == first.chat_template and second.special_tokens_map == {"eos_token": "<end>"}
