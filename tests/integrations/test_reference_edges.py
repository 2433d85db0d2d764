"""The reference signatures: state after a call, debug output, and refused arguments."""

import ast
import copy
import gc
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import UsageError
from slipstream.integrations import decoder_cache
from slipstream.integrations.reference import (
    GreedyProcessor,
    MultinomialProcessor,
    NucleusProcessor,
    SpeculativeDecoder,
    TopKNucleusProcessor,
    TopKProcessor,
    autoregressive_generate,
    speculative_generate,
    speculative_generate_batch,
)
from tests.support.markers import subcases
from tests.support.reference_cases import PROMPTS, WORDS, greedy, pair
from tests.support.tiny_models import VOCAB as LETTERS
from tests.support.tiny_models import fresh, perturbed, prompts, reference, shared

pytestmark = pytest.mark.slow

# State after a call


def test_models_are_freed_with_their_last_user() -> None:
    target, drafter = fresh("llama"), fresh("llama", 1)
    speculative_generate(PROMPTS[0], drafter, target)
    alive = [weakref.ref(target), weakref.ref(drafter)]
    del target, drafter
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_a_decoder_is_reused_until_its_models_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    original = decoder_cache._DecoderInsideGenerate
    monkeypatch.setattr(decoder_cache, "_DecoderInsideGenerate", lambda *a, **k: built.append(a) or original(*a, **k))
    target, drafter = fresh("llama"), fresh("llama", 1)
    for _ in range(3):
        first = speculative_generate(PROMPTS[0], drafter, target, eos_tokens_id=None)[0]
        autoregressive_generate(PROMPTS[0], target)
    assert len(built) == 1
    target.load_state_dict(fresh("llama", 2).state_dict())  # new weights: nothing may be remembered
    second = speculative_generate(PROMPTS[0], drafter, target, eos_tokens_id=None)[0]
    assert len(built) == 1 and second == reference(target, PROMPTS[0], 40) != first
    speculative_generate(PROMPTS[0], fresh("llama", 3), target)
    assert len(built) == 2
    assert autoregressive_generate(PROMPTS[0], target.double(), eos_tokens_id=None) == reference(target, PROMPTS[0], 40)
    assert len(built) == 2  # the decoder of a model examines the model again after its type changed


def test_copies_and_pickles_of_a_model_do_not_carry_its_decoder() -> None:
    target = fresh("llama")
    before = target.state_dict().keys()
    speculative_generate(PROMPTS[0], target, target)
    for other in (copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
        assert vars(other)[decoder_cache.ATTRIBUTE] is None
        assert greedy(PROMPTS[0], models=(other, other))[0] == greedy(PROMPTS[0], models=(target, target))[0]
    assert target.state_dict().keys() == before


def test_heads_padded_differently_need_the_tokenizer() -> None:
    target, drafter = shared("llama"), fresh("llama", 1, vocab_size=LETTERS + 3)
    with pytest.raises(UsageError, match=f"{LETTERS + 3} logits"):
        speculative_generate(PROMPTS[0], drafter, target)
    ids, _ = speculative_generate(PROMPTS[0], drafter, target, WORDS, eos_tokens_id=None)
    assert ids == reference(target, PROMPTS[0], 40)


# debug output


def test_debug_output_distinguishes_accepted_from_rejected_without_color(capsys: pytest.CaptureFixture[str]) -> None:
    ids, rate = greedy(PROMPTS[1], tokenizer=WORDS, debug=True)
    out, err = capsys.readouterr()
    groups = re.findall(r"(accepted|rejected|unused|recovered|bonus|plain) (\[.*?\])(?=,|$)", err, re.MULTILINE)
    names = {
        kind: [name for what, found in groups if what == kind for name in ast.literal_eval(found)] for kind, _ in groups
    }
    assert out == "" and err.startswith("row 0 round 1: ") and err.endswith("end (length)\n")
    assert rate == len(names["accepted"]) / sum(len(names.get(k, [])) for k in ("accepted", "rejected", "unused"))
    committed = [n for what, found in groups if what not in ("rejected", "unused") for n in ast.literal_eval(found)]
    assert committed == WORDS.convert_ids_to_tokens(ids)


def test_debug_shows_ids_without_a_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    ids = autoregressive_generate(PROMPTS[0], shared("qwen2"), max_gen_len=2, eos_tokens_id=None, debug=True)
    lines = [f"row 0 round 1: plain [{ids[0]}]", f"row 0 round 2: plain [{ids[1]}], end (length)"]
    assert capsys.readouterr().err.splitlines() == lines


def test_debug_output_marks_drafts_after_the_end_as_unused(capsys: pytest.CaptureFixture[str]) -> None:
    target = shared("qwen2")
    plain = reference(target, PROMPTS[0], 9)
    speculative_generate(PROMPTS[0], target, target, gamma=8, max_gen_len=9, eos_tokens_id=plain[2], debug=True)
    at = plain.index(plain[2]) + 1
    first = f"row 0 round 1: plain {plain[:1]}\n"
    expected = f"{first}row 0 round 2: accepted {plain[1:at]}, unused {plain[at:8]}, end (stop)\n"
    assert capsys.readouterr().err == expected


# refusals


class NoDistribution(MultinomialProcessor):
    def _process(self, logits: Tensor) -> Tensor:
        return logits + torch.rand(())


class NoShape(MultinomialProcessor):
    def __call__(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)


class OwnDraw(MultinomialProcessor):
    def sample(self, probs: Tensor) -> Tensor:
        return torch.multinomial(probs, 1) + 1000


@subcases(
    "options, message",
    [
        ({"gamma": -1}, "gamma=-1; allowed: a whole number from 0 to 64"),
        ({"gamma": True}, "gamma=True; allowed"),
        ({"gamma": 65}, "gamma=65; allowed"),
        ({"max_gen_len": 0}, "max_gen_len=0; allowed: a whole number, 1 or more"),
        ({"eos_tokens_id": LETTERS}, f"eos_tokens_id={LETTERS}; allowed: a token id from 0 to {LETTERS - 1}"),
        ({"eos_tokens_id": [1, -1]}, r"eos_tokens_id=\[1, -1\]; allowed"),
        ({"eos_tokens_id": "x"}, "eos_tokens_id='x'; allowed"),
        ({"tokenizer": 35}, "tokenizer=35; allowed: None or a Hugging Face tokenizer"),
        ({"logits_processor": GreedyProcessor}, "is the class GreedyProcessor; allowed: an object"),
        ({"logits_processor": torch.softmax}, "is a builtin_function_or_method; allowed"),
        ({"logits_processor": NoDistribution(1.0)}, "NoDistribution gave two answers"),
        ({"logits_processor": NoShape(1.0)}, r"NoShape gave shape \(1,\); allowed"),
        ({"logits_processor": OwnDraw(1.0)}, "OwnDraw sampled token"),
        ({"logits_processor": OwnDraw(1.0), "skip_sample_adjustment": True}, "a `sample` of its own"),
        ({"models": (None, shared("qwen2"))}, "drafter=None; allowed"),
        ({"models": ("gpt2", shared("qwen2"))}, "drafter is a str; allowed: a loaded"),
        ({"models": (shared("qwen2"), "gpt2")}, "target is a str; allowed: a loaded"),
    ],
)
def test_invalid_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        greedy(PROMPTS[0], **options)


@subcases(
    "make, message",
    [
        (lambda: MultinomialProcessor(0.0), "temperature=0.0; allowed: a finite number > 0"),
        (lambda: TopKProcessor(1.0, 0), "top_k=0; allowed: a whole number, 1 or more"),
        (lambda: NucleusProcessor(1.0, 1.5), "top_p=1.5; allowed: a number from 0 to 1"),
        (lambda: TopKNucleusProcessor(1.0, 2.0, 0.5), "top_k=2.0; allowed"),
        (lambda: greedy([]), r"inputs=\[\]; allowed: a list of at least one token id"),
        (lambda: greedy([PROMPTS[0]]), "one prompt, not padded"),
        (lambda: greedy([LETTERS]), f"token id {LETTERS}; allowed: 0 to {LETTERS - 1}"),
        (lambda: greedy([3] * 96, models=(shared("gpt2"),) * 2), "prompt has 96 tokens; allowed: at most 95"),
        (lambda: speculative_generate_batch(torch.ones(2, 3), *pair()), "inputs is a Tensor; allowed"),
        (lambda: speculative_generate_batch([PROMPTS[0], "x"], *pair()), r"inputs\[1\]='x'; allowed"),
        (lambda: SpeculativeDecoder(*pair(), draft_tokens=65), "draft_tokens=65; allowed: a whole number from 0 to 64"),
        (lambda: SpeculativeDecoder(shared("llama"), None), "draft_model=None; allowed"),
        (lambda: SpeculativeDecoder(shared("llama"), shared("gpt2")).decode([[1]], 2), r"input_ids=\[\[1\]\]; allowed"),
        (lambda: chapter(torch.ones(2, 3).long(), 2), r"shape \(2, 3\); allowed: \(1, n\)"),
        (lambda: chapter(torch.ones(1, 3), 2), "allowed: a tensor of token ids"),
        (lambda: chapter(torch.ones(1, 90).long(), 7), "max_new_tokens=7; allowed: a whole number from 1 to 6"),
        (lambda: chapter(torch.ones(1, 96).long(), 1), "input_ids has 96 tokens; allowed: at most 95"),
    ],
)
def test_invalid_inputs_are_refused_by_name(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def chapter(input_ids: Tensor, count: int) -> Tensor:
    return SpeculativeDecoder(shared("gpt2"), perturbed("gpt2")).decode(input_ids, count)


def test_text_ends_with_the_models_context(caplog: pytest.LogCaptureFixture) -> None:
    prompt = prompts([90])[0]
    assert autoregressive_generate(torch.tensor(prompt), shared("gpt2"), eos_tokens_id=None) == (
        reference(shared("gpt2"), prompt, 6)
    )
    assert "max_gen_len=40 is cut to 6" in caplog.text
