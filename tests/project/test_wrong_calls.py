"""Common mistakes in Python calls: each is refused in one clear line, and similar names are suggested.

`pytest -s tests/project/test_wrong_calls.py` prints the table.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import slipstream
from slipstream import Constraint, SamplingParams, SlipstreamError, SpeculativeDecoder
from tests.support.tiny_models import fresh, tokenizer

LONGEST = 500  # characters of a line
TOOL = {"type": "function", "function": {"name": "add"}}
# a call, and what its error must contain: the wrong value, and what to do instead
CALLS: tuple[tuple[str, str], ...] = (
    # models
    ("SpeculativeDecoder()", "missing a required argument: 'target'"),
    ("SpeculativeDecoder(None)", "model None is a NoneType"),
    ("SpeculativeDecoder('smolm2')", "did you mean smollm2?"),
    ("SpeculativeDecoder('./nowhere')", "'./nowhere' is not a folder"),
    ("SpeculativeDecoder('toy', 'toy', 'toy')", "too many positional arguments"),
    ("SpeculativeDecoder('toy', draft_model='toy')", "did you mean draft=...?"),
    ("SpeculativeDecoder('toy', assistant_model='toy')", "did you mean draft=...?"),
    ("SpeculativeDecoder('toy', device_map='auto')", "did you mean load_options={'device_map': ...}?"),
    ("SpeculativeDecoder('toy', torch_dtype='auto')", "did you mean dtype='bfloat16'?"),
    ("SpeculativeDecoder('toy', trust_remote_code=True)", "did you mean load_options={'trust_remote_code': ...}?"),
    ("SpeculativeDecoder('toy', load_in_4bit=True)", "did you mean quantize='int4' or 'int8'?"),
    ("SpeculativeDecoder('toy', gamma=4)", "did you mean num_draft_tokens=...?"),
    ("SpeculativeDecoder('toy', max_tokens=4)", "did you mean decoder.generate(prompt, max_tokens=...)?"),
    ("SpeculativeDecoder('toy', acceptence='match')", "did you mean 'acceptance'?"),
    ("SpeculativeDecoder('toy', drafter='ngarm')", "did you mean 'ngram'?"),
    ("SpeculativeDecoder('toy', acceptance='typcal')", "did you mean 'typical'?"),
    ("SpeculativeDecoder('toy', dtype='bfloat61')", "did you mean 'bfloat16'?"),
    ("SpeculativeDecoder('toy', dtype=16)", "dtype=16; allowed: auto, bfloat16"),
    ("SpeculativeDecoder('toy', device='gpu')", "device"),
    ("SpeculativeDecoder('toy', load_options='auto')", "load_options='auto'; allowed: a mapping"),
    ("SpeculativeDecoder(MODEL, tokenizer='smollm2')", "tokenizer='smollm2'; allowed: a Hugging Face tokenizer"),
    ("SpeculativeDecoder(MODEL.config)", "model LlamaConfig"),
    ("SpeculativeDecoder('')", "model '' is empty; Available here: "),
    ("SpeculativeDecoder('toy', '')", "model '' is empty; Available here: "),
    ("SpeculativeDecoder('toy', torch.zeros(2, 2).numpy())", "; allowed: a hub id, a folder"),
    ("SpeculativeDecoder('toy', drafter=torch.zeros(2, 2).numpy())", "; allowed: a name or an object with propose"),
    ("slipstream.SpeculativeDecoders", "did you mean 'SpeculativeDecoder'?"),
    # prompts
    ("decoder.generate()", "missing 1 required positional argument: 'prompt'"),
    ("decoder.generate('a', chat='no')", "chat='no'; allowed: True or False"),
    ("decoder.encode('a', chat=torch.zeros(2))", "; allowed: True or False"),
    ("list(decoder.rounds(None))", "prompt None; allowed: a text"),
    ("decoder.generate([1, 999])", ": token id 999; allowed: 0 to 256"),
    ("decoder.generate(torch.zeros(2))", "array of float32; allowed: whole numbers"),
    ("decoder.generate([{'content': 'hi'}])", "message 0 has the role None"),
    (
        "decoder.generate([{'role': 'user', 'content': [{'type': 'image'}]}])",
        "part 0 is an image, but model 'toy' sees none",
    ),
    ("next(decoder.stream(['a', 'b']))", "allowed: stream takes one prompt"),
    ("next(decoder.stream([]))", "prompt is an empty list"),
    ("decoder.stream('a').result", "allowed: after the loop"),
    # conversations and tools
    ("chatting.chat('hello')", "messages='hello'; allowed: a list of chat messages"),
    ("chatting.chat(torch.zeros(2, 2))", "; allowed: a list of chat messages"),
    ("chatting.chat([])", "messages=[]; allowed: a list of chat messages"),
    ("chatting.chat([[{'role': 'user', 'content': 'hi'}]])", "chat takes one, generate takes a list"),
    ("chatting.chat([{'role': 'user'}])", "message 0 has nothing but a role"),
    ("chatting.chat([{'role': 'user', 'content': 'hi'}], tools=[TOOL])", "does not read; allowed: no tools"),
    ("chatting.chat([{'role': 'user', 'content': 'hi'}], tools=[print])", "tool 0 is code"),
    ("chatting.chat([{'role': 'user', 'content': 'hi'}], tools='add')", "tools='add'; allowed: a list"),
    # options
    ("decoder.generate('a', SamplingParams(), max_tokens=5)", "params and max_tokens= are both given"),
    (
        "decoder.generate('a', {'max_tokens': 5})",
        "params: dict; allowed: SamplingParams, or keywords such as max_tokens",
    ),
    ("decoder.generate('a', temprature=0.5)", "did you mean 'temperature'?"),
    ("decoder.generate('a', max_new_tokens=5)", "did you mean max_tokens=...?"),
    ("decoder.generate('a', enable_thinking=False)", "did you mean chat_template_kwargs={'enable_thinking': ...}?"),
    ("decoder.encode('a', temperature=1)", "unknown option 'temperature'; allowed: tools, chat_template_kwargs, conti"),
    ("decoder.generate('a', chat_template_kwargs={'x': 1})", "chat_template_kwargs with a text without the chat te"),
    ("decoder.generate([5], continue_final_message=True)", "continue_final_message with token ids; allowed: with chat"),
    ("chatting.generate('a', chat_template_kwargs=[1])", "chat_template_kwargs=[1]; allowed: a dictionary, such as"),
    ("chatting.generate('a', chat_template_kwargs={'x': 1})", "chat_template_kwargs: 'x'; allowed: none"),
    ("chatting.generate('a', continue_final_message='yes')", "continue_final_message='yes'; allowed: True or False"),
    ("chatting.generate('a', continue_final_message=True)", "continue_final_message with a text; allowed: with chat"),
    ("decoder.generate('a', stream=True)", "did you mean decoder.stream(prompt)?"),
    ("decoder.generate('a', [SamplingParams()] * 2)", "params: 2 given for 1 prompt; allowed"),
    ("decoder.generate('a', do_sample=True)", "did you mean temperature=1.0 (0 is greedy)?"),
    ("decoder.generate(['a', 'b'], [SamplingParams()])", "params: 1 given for 2 prompts"),
    ("chatting.generate([5], max_tokens=10**6)", "max_tokens=1000000; allowed: at most"),
    ("SamplingParams(0.7)", "too many positional arguments"),
    ("SamplingParams(n=10**6, temperature=1)", "n=1000000; allowed: a whole number from 1 to 1024"),
    ("SamplingParams(n=2, temperature=0)", "n=2; allowed: 1 with temperature=0"),
    ("SamplingParams(stop_strings=['a'])", "did you mean stop=[...]?"),
    ("Constraint()", "constraint: nothing given; allowed: one of json_schema"),
    ("Constraint(schema={})", "did you mean json_schema=...?"),
    ("Constraint(regexp='a')", "did you mean 'regex'?"),
    ("Constraint(regex='a', choice=['b'])", "regex and choice given"),
    ("Constraint(regex='[')", "unclosed character class"),
    ("Constraint(regex=torch.zeros(2))", "; allowed: a text of valid Unicode"),
    ("Constraint(grammar='start: /a/', schemas=5)", "schemas=5; allowed: a mapping of names to JSON schemas"),
    # the rest
    ("decoder.encode(5)", "prompt 5; allowed: "),
    ("decoder.decode('text')", "token_ids='text'; allowed: a list of token ids"),
    ("decoder.decode([999])", "token id 999; allowed: 0 to 256"),
    ("decoder.batch(None, 'a.jsonl')", "source=None; allowed: the name of a file, or a list of dictionaries"),
    ("decoder.batch({'id': 'a', 'prompt': 'b'}, 'a.jsonl')", "allowed: the name of a file, or a list of dictionaries"),
    ("decoder.batch([], None)", "output=None; allowed: the name of a file"),
    ("decoder.batch([], '')", "output=''; allowed: the name of a file"),
    ("decoder.batch([], 'a\\0b')", "; allowed: the name of a file"),
    ("decoder.batch([], 'a.jsonl', errors=5)", "errors=5; allowed: the name of a file"),
    ("decoder.batch([], 'a.jsonl', params=5)", "params=5; allowed: SamplingParams"),
    ("decoder.batch([], '-')", "output='-'; allowed: the name of a file"),
    (
        "SpeculativeDecoder('toy', drafter=type(decoder))",
        "allowed: a name or an object, such as SpeculativeDecoder(...)",
    ),
    ("SpeculativeDecoder('toy', drafter='ngram:')", "drafter='ngram:'; allowed: ngram[:N]"),
    ("decoder.using('suffix:store=absent.npz')", "'absent.npz' is not a file; allowed: a file that SuffixDrafter.save"),
    ("SpeculativeDecoder('toy', drafter='NGRAM')", "did you mean 'ngram'?"),
    (
        "SpeculativeDecoder('toy', max_batch_size=10**12)",
        "max_batch_size=1000000000000; allowed: a whole number from 1",
    ),
    ("SpeculativeDecoder('https://huggingface.co/Qwen/Qwen3-8B')", "did you mean 'Qwen/Qwen3-8B'?"),
    ("decoder.using(acceptance=torch.zeros(2))", "acceptance='Tensor'; allowed: "),
    ("decoder.using('ngarm')", "did you mean 'ngram'?"),
    ("decoder.with_draft('smolm2')", "did you mean smollm2?"),
    ("closed.generate('a')", "this decoder is closed"),
)


@cache
def names() -> dict[str, Any]:
    closed = SpeculativeDecoder("toy")
    closed.close()
    model = fresh("llama")
    return {
        **{"slipstream": slipstream, "torch": torch, "TOOL": TOOL, "MODEL": model, "closed": closed},
        **{"Constraint": Constraint, "SamplingParams": SamplingParams, "SpeculativeDecoder": SpeculativeDecoder},
        "decoder": SpeculativeDecoder("toy"),
        "chatting": SpeculativeDecoder(model, tokenizer=tokenizer(), reproducible=False),
    }


def refusal(call: str) -> BaseException | None:
    try:
        eval(call, names())
    except Exception as error:
        return error
    return None


def test_every_wrong_call_is_refused_in_one_clear_line(subtests: pytest.Subtests) -> None:
    assert len(CALLS) >= 60
    for call, expected in CALLS:
        error = refusal(call)
        print(f"{call:70} {type(error).__name__}: {error}")
        with subtests.test(call):
            assert isinstance(error, SlipstreamError | TypeError | ValueError | AttributeError)
            assert expected in str(error) and "\n" not in str(error) and len(str(error)) <= LONGEST


def test_valid_calls_are_not_refused() -> None:
    right = (
        "decoder.generate('a', max_tokens=2)",
        "Constraint(regex='a')",
        "decoder.decode([97])",
        "decoder.encode('a')",
    )
    assert [refusal(call) for call in right] == [None] * len(right)


def test_unknown_arguments_are_python_errors_too() -> None:
    error = refusal("SpeculativeDecoder('toy', draft_model='toy')")
    assert isinstance(error, TypeError) and isinstance(error, ValueError) and isinstance(error, SlipstreamError)
