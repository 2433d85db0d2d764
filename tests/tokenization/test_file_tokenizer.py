"""Tokenizers read from files without transformers make the tokens that its wrapper makes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from slipstream.models.weights.gguf_configuration import described
from slipstream.models.weights.gguf_file import read_header
from slipstream.tokenization.file_tokenizer import FileTokenizer
from slipstream.tokenization.hf_tokenizer import HFTokenizer, as_file_tokenizer
from slipstream.tokenization.tokenizer import ChatForm
from tests.support.gguf_files import byte_level, write_model
from tests.support.markers import mostly_exhaustive
from tests.support.tiny_models import byte_tokenizer

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}<end>{% endfor %}\n"
TEXTS = [
    "",
    " ",
    "Why is the sky blue?\n\n  2 + 2 = 4; naïve e\u0301 日本語 \U0001f600\t\r\n",
    "<s>a <end><think>b</think> <|im_start|>user\n<|im_end|> </s><pad>",
    "\x00\u200b\ufeff" + "word " * 50,
]
CONVERSATION = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]


def check_same(folder: Path, wrapper: Any = None) -> None:
    """Compare a folder's tokenizer with transformers' wrapper of the same files, or of others."""
    inner, wrapper = FileTokenizer.read(folder), wrapper or PreTrainedTokenizerFast.from_pretrained(folder)
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


CLASSES = ("PreTrainedTokenizerFast", "Qwen2Tokenizer", "GPT2Tokenizer", "GemmaTokenizer", "LlamaTokenizer")
CACHE = Path.home() / ".cache" / "slipstream" / "models"


def checkpoint_tokenizer(folder: Path, model: str, kind: str) -> Any:
    """transformers' tokenizer of a model in the cache, if its files named this class."""
    if not (CACHE / model / "tokenizer.json").is_file():
        pytest.skip(f"needs {model} in the cache of models")
    for name in ("tokenizer.json", "chat_template.jinja"):
        if (CACHE / model / name).is_file():
            shutil.copy(CACHE / model / name, folder / name)
    settings = json.loads((CACHE / model / "tokenizer_config.json").read_text())
    settings.pop("infill_names", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": kind}))
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, kind",
    mostly_exhaustive(
        product(["smollm2", "qwen0.5b", "gemma3"], CLASSES),
        *product(["smollm2"], CLASSES),
        *[("qwen0.5b", "Qwen2Tokenizer"), ("gemma3", "GemmaTokenizer")],
    ),
)
def test_a_copy_of_transformers_tokenizer_stands_for_it(model: str, kind: str, tmp_path: Path) -> None:
    original = checkpoint_tokenizer(tmp_path, model, kind)
    reference, saved = HFTokenizer(original), tmp_path / "saved"
    copy = as_file_tokenizer(reference)
    assert copy is not None
    saved.mkdir()
    copy.save(saved)
    check_same(saved, original)
    own = HFTokenizer(FileTokenizer.read(saved))
    assert own.digest() == reference.digest()
    ids = list(range(0, len(copy), 997))
    for text in (*AWKWARD, original.decode(ids)):
        assert own.encode(text) == reference.encode(text) and own.bare(text) == reference.bare(text), text
        assert own.decode(own.encode(text)) == reference.decode(own.encode(text))
    assert [own.decode([token]) for token in ids] == [reference.decode([token]) for token in ids]
    # transformers makes some classes from vocabulary and merges alone, and then the file itself says something else
    as_it_is = HFTokenizer(FileTokenizer.read(tmp_path))
    is_rebuilt = (model, kind) in REBUILT
    assert all(as_it_is.encode(text) == reference.encode(text) for text in AWKWARD) != is_rebuilt


REBUILT = [
    *(("smollm2", kind) for kind in ("Qwen2Tokenizer", "GemmaTokenizer")),
    *(("qwen0.5b", kind) for kind in ("GPT2Tokenizer", "GemmaTokenizer")),
    *(("gemma3", kind) for kind in ("Qwen2Tokenizer", "GPT2Tokenizer", "LlamaTokenizer")),
]
AWKWARD = [
    *("", " ", "  a", "a  ", "\n\n\t x", "Hello, world! It's don't 12345 1 000", "e\u0301 \ufb01 \u2126", "\r\n a\r"),
    *("\u65e5\u672c\u8a9e \u4e2d\u6587 \ud55c\uad6d\uc5b4", "\U0001f642\U0001f469\u200d\U0001f469\u200d\U0001f467"),
    *("<|im_start|>user\nhi<|im_end|>", "<bos><eos>", "</s> x <s>", "a\x00b", "\u200b\ufeff", "x" * 300),
    *("def f(x):\n    return x ** 2\n", "<start_of_turn>model", " \u2581 \u2581", "Stra\u00dfe \u0130 \u0131"),
]


class OtherTokenizer(PreTrainedTokenizerFast):
    """Encodes in another way."""

    def _encode_plus(self, text: Any, **options: Any) -> Any:
        return super()._encode_plus(text.lower(), **options)


def test_a_tokenizer_that_does_more_has_no_copy(tmp_path: Path) -> None:
    usual = byte_tokenizer("{{ messages }}")
    assert as_file_tokenizer(HFTokenizer(usual)) is not None
    usual.save_pretrained(tmp_path)
    for change in ({"split_special_tokens": True}, {"chat_template": {"default": "a", "tool_use": "b"}}):
        changed = PreTrainedTokenizerFast.from_pretrained(tmp_path, **change)
        assert as_file_tokenizer(HFTokenizer(changed)) is None
    assert as_file_tokenizer(HFTokenizer(OtherTokenizer.from_pretrained(tmp_path))) is None
    in_python = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    in_python.backend_tokenizer.pre_tokenizer = PreTokenizer.custom(object())
    assert as_file_tokenizer(HFTokenizer(in_python)) is None
    usual.response_template = "{}"
    assert as_file_tokenizer(HFTokenizer(usual)) is None


def test_marks_of_an_answer_are_decoded_as_by_transformers(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|channel>thought\n{{ m.content }}<channel|>{% endfor %}"
    original = byte_tokenizer(template)
    original.add_special_tokens({"additional_special_tokens": ["<|channel>", "<channel|>"]})
    reference, copy = HFTokenizer(original), as_file_tokenizer(HFTokenizer(original))
    assert copy is not None
    own, text = HFTokenizer(copy), "<|channel>thought\na<channel|>b<eos>"
    assert own._mark_ids == reference._mark_ids != frozenset()
    assert (
        own.decode_marked(own.encode(text)) == reference.decode_marked(own.encode(text)) == text.removesuffix("<eos>")
    )
