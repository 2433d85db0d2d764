"""Prompts with a gap: the tokens of each family, their order, and texts without spaces that nobody wrote."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from slipstream import SpeculativeDecoder, UsageError
from slipstream.models.cache_folder import cache_folder
from slipstream.models.weights.tokenizer_loading import inspect_vocabulary
from slipstream.tokenization.file_tokenizer import FileTokenizer
from slipstream.tokenization.hf_tokenizer import HFTokenizer
from slipstream.tokenization.infill import NAMES, InfillTokens, infill
from tests.support import vocabularies
from tests.support.markers import subcases

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")
PREFIX, SUFFIX = "def f(x):\n    ", "return x\n"


def with_tokens(kind: str, names: tuple[str, ...] = QWEN) -> HFTokenizer:
    inner = copy.deepcopy(vocabularies.tokenizer(kind))
    inner.add_special_tokens({"additional_special_tokens": [*vocabularies.SPECIALS[1:], *names]})
    return HFTokenizer(inner)


@subcases(
    "names, template",
    [
        (QWEN, "<|fim_prefix|>{{ .Prompt }}<|fim_suffix|>{{ .Suffix }}<|fim_middle|>"),
        ((*NAMES[1], "<file_sep>"), "<fim_prefix>{{ .Prompt }}<fim_suffix>{{ .Suffix }}<fim_middle>"),
        (NAMES[3], "<｜fim▁begin｜>{{ .Prompt }}<｜fim▁hole｜>{{ .Suffix }}<｜fim▁end｜>"),  # noqa: RUF001
        (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]{{ .Suffix }}[PREFIX]{{ .Prompt }}"),
    ],
)
def test_a_familys_tokens_stand_in_its_order(names: tuple[str, ...], template: str) -> None:
    tokens = InfillTokens.of({name: number for number, name in enumerate((*names, "def"))})
    assert tokens is not None and tokens.template == template
    assert sorted(tokens.ids.values()) == list(range(len(names)))  # all of them end the text
    assert InfillTokens.of({name: 1 for name in names[1:]}) is None


def test_the_files_own_names_come_first() -> None:
    tokens = InfillTokens.of(
        {name: number for number, name in enumerate((*QWEN, "<a>", "<b>", "<c>"))}, ["<a>", "<b>", "<c>"]
    )
    assert tokens is not None and tokens.template == "<a>{{ .Prompt }}<b>{{ .Suffix }}<c>"


@pytest.mark.parametrize("kind", vocabularies.KINDS)
def test_a_prompt_is_its_two_texts_between_the_tokens(kind: str) -> None:
    tokenizer = with_tokens(kind)
    ids = tokenizer.vocabulary()
    parts = infill(tokenizer, PREFIX, SUFFIX)
    cut, end = parts.ids.index(ids["<|fim_suffix|>"]), parts.ids.index(ids["<|fim_middle|>"])
    begin = parts.ids.index(ids["<|fim_prefix|>"])
    assert parts.ids[:begin] == tokenizer.opening() and end == len(parts.ids) - 1
    assert parts.ids[begin + 1 : cut] == tokenizer.bare(PREFIX)
    pieces = tokenizer.inner.convert_ids_to_tokens(parts.ids[cut + 1 : end])
    assert tokenizer.decode(parts.ids[cut + 1 : end]) == SUFFIX and not pieces[0].startswith(vocabularies.SPACE)
    assert infill(tokenizer, PREFIX, SUFFIX, opened=False).ids == parts.ids[begin:]
    assert set(parts.ends) == {ids[name] for name in QWEN}


def test_names_outlive_saving(tmp_path: Any) -> None:
    backend = copy.deepcopy(vocabularies.tokenizer("bytes").backend_tokenizer)
    backend.add_special_tokens(["<a>", "<b>", "<c>"])
    FileTokenizer(backend, {}, None, ["<a>", "<b>", "<c>"]).save(tmp_path)
    tokens = HFTokenizer(FileTokenizer.read(tmp_path)).infill_tokens()
    assert tokens is not None and (tokens.prefix, tokens.suffix, tokens.middle) == ("<a>", "<b>", "<c>")


def test_a_vocabulary_without_such_tokens_is_refused() -> None:
    for tokenizer in (HFTokenizer(vocabularies.tokenizer("bytes")), None):
        with pytest.raises(
            UsageError, match="suffix: this model has no tokens for infilling; allowed: a prompt without"
        ):
            infill(tokenizer, PREFIX, SUFFIX)


def test_an_infill_is_plain_decoding_of_its_tokens() -> None:
    tokenizer = with_tokens("bytes")
    decoder = SpeculativeDecoder(vocabularies.speaking("bytes"), tokenizer=tokenizer.inner, drafter="suffix")
    parts = infill(tokenizer, PREFIX, SUFFIX)
    plain = decoder.using("none").generate(parts.ids, max_tokens=30, stop_token_ids=parts.ends)
    result = decoder.generate(PREFIX, max_tokens=30, suffix=SUFFIX)
    assert result.token_ids == plain.token_ids and result.prompt_token_ids == parts.ids
    several = decoder.generate(PREFIX, suffix=SUFFIX, n=2, temperature=1.0, seed=3, max_tokens=30)
    sampled = decoder.generate(parts.ids, n=2, temperature=1.0, seed=3, max_tokens=30, stop_token_ids=parts.ends)
    assert [text.token_ids for text in several.alternatives] == [text.token_ids for text in sampled.alternatives]
    pad = tokenizer.vocabulary()["<|fim_pad|>"]
    ended = decoder.generate(PREFIX, suffix=SUFFIX, logit_bias={pad: 1e6})
    assert (ended.finish_reason, ended.text, ended.token_ids) == ("stop", "", [pad])
    assert (
        decoder.generate(PREFIX, suffix=SUFFIX, logit_bias={pad: 1e6}, ignore_eos=True, max_tokens=3).token_ids
        == [pad] * 3
    )
    for prompt, options, why in (
        ([1, 2], {}, "suffix with token ids"),
        ([{"role": "user", "content": "x"}], {}, "suffix with chat messages"),
        ("x", {"chat_template_kwargs": {"y": 1}}, "suffix with options of the chat template"),
        ("x" * 100_000, {}, "prompt has "),
    ):
        with pytest.raises(UsageError, match=why):
            decoder.generate(prompt, suffix=SUFFIX, **options)


@pytest.mark.models
def test_a_qwen_coder_file_is_asked_in_the_form_of_its_card() -> None:
    """The prompt and the ends that the model card of Qwen2.5-Coder gives, from a GGUF file's tokenizer."""
    file = cache_folder() / "qwen0.5b.gguf"
    if not file.is_file():
        pytest.skip(f"needs the model {file}")
    tokenizer = inspect_vocabulary(str(file)).tokenizer
    assert isinstance(tokenizer, HFTokenizer)
    parts = infill(tokenizer, PREFIX, SUFFIX)
    assert parts.ids == tokenizer.bare(f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>")
    assert {151659, 151661, 151662, 151663, 151664} <= set(parts.ends)
