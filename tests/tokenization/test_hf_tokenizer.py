"""The chat template and the special tokens of a Hugging Face tokenizer."""

from __future__ import annotations

import copy

import pytest

from slipstream import SpeculativeDecoder, UsageError
from slipstream.tokenization.hf_tokenizer import HFTokenizer
from slipstream.tokenization.tokenizer import ChatForm
from slipstream.wiring.model_pair import fingerprint_of
from tests.support import tiny_models

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}{{ m.get('reasoning_content') }}{% if 'prefix' in m %}!{% endif %}"
    "{{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{{ eos_token }}{{ thinking }}"
)


def test_variables_and_fields_that_a_template_reads_are_found() -> None:
    ours = HFTokenizer(tiny_models.tokenizer(template=TEMPLATE))
    assert {"tools", "thinking", "messages"} <= ours.template_variables()
    assert not {"eos_token", "reasoning_effort"} & ours.template_variables()
    assert {"role", "content", "reasoning_content", "prefix"} <= ours.template_fields()
    assert "tool_calls" not in ours.template_fields()
    several = tiny_models.tokenizer()
    several.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}", "rag": "{{ documents }}{% no %}"}
    assert HFTokenizer(several).template_variables() == {"messages", "tools"}  # no request reaches the third


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ tools }}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}{{ tools }}",
        "{% set n = namespace(n=0) %}{{ strftime_now('')}}{{ messages[-1].content }}{{ dict(a=1)['b'] }}{{ tools }}",
    ],
)
def test_what_a_template_reads_is_known_for_all_that_transformers_renders(template: str) -> None:
    ours = HFTokenizer(tiny_models.tokenizer(template=template))
    assert ours.template_variables() == {"messages", "tools"} and "content" in ours.template_fields()
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert ours.chat(messages) == ours.bare(ours.inner.apply_chat_template(messages, tokenize=False))
    with pytest.raises(UsageError, match="chat_template_kwargs: 'namespace'; allowed: none"):
        ours.chat(messages, ChatForm(variables={"namespace": 1}))


def test_a_variable_of_another_named_template_is_refused() -> None:
    several = tiny_models.tokenizer()
    several.chat_template = {"default": "{{ messages }}", "tool_use": "{{ messages }}{{ tools }}{{ style }}"}
    with pytest.raises(UsageError, match="chat_template_kwargs: 'style'; allowed: none"):
        HFTokenizer(several).chat([{"role": "user", "content": "b"}], ChatForm(variables={"style": 1}))


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{% for _ in range(10 ** 9) %}{% endfor %}", "{{ 1 + 'a' }}"])
def test_an_error_in_a_template_is_one_clear_line(template: str) -> None:
    with pytest.raises(UsageError, match=r"^the chat template cannot render these messages: "):
        HFTokenizer(tiny_models.tokenizer(template=template)).chat([{"role": "user", "content": "hi"}])


def test_special_ids_are_the_special_tokens_only() -> None:
    ours = HFTokenizer(tiny_models.tokenizer())
    assert ours.special_ids() >= {*ours.bare("<eos>"), *ours.bare("<pad>")}
    assert not set(ours.bare("hi")) & ours.special_ids()


def test_the_fingerprint_covers_tokenizer_templates_and_end_tokens() -> None:
    model = tiny_models.shared("llama")

    def fingerprint(**changes: object) -> str:
        inner = tiny_models.tokenizer()
        for name, value in changes.items():
            setattr(inner, name, value)
        decoder = SpeculativeDecoder(model, tokenizer=inner, drafter="none")
        return fingerprint_of(decoder.target, decoder.shapes)

    plain = fingerprint()
    assert plain == fingerprint()
    for changes in ({"chat_template": TEMPLATE}, {"response_template": {"fields": {}}}, {"bos_token": "<eos>"}):
        assert fingerprint(**changes) != plain, changes
    padded, other = tiny_models.tokenizer(), tiny_models.tokenizer(["§"])
    padded(["a", "abc"], padding=True)  # leaves a mark in the tokenizer that no text depends on
    assert HFTokenizer(padded).digest() == HFTokenizer(tiny_models.tokenizer()).digest() != HFTokenizer(other).digest()
    ends = copy.deepcopy(model)
    ends.generation_config.eos_token_id = [5]
    changed = SpeculativeDecoder(ends, tokenizer=tiny_models.tokenizer(), drafter="none")
    assert changed.target.end_ids == (5,) and fingerprint_of(changed.target, changed.shapes) != plain
