"""Vision-language models: prompts and texts are those of transformers, drafts change none, and pixels count."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from slipstream import Draft, SamplingParams, SpeculativeDecoder, UsageError
from slipstream.core.types import Row
from slipstream.models.hf.vision import FAMILIES
from slipstream.sampling.sampler import Sampler
from tests.integrations.test_text_and_images import multimodal
from tests.support.markers import mostly_exhaustive
from tests.support.plain_texts import drafted_as_plain
from tests.support.tiny_models import byte_tokenizer
from tests.support.vision_models import MARKS, asked, picture, png, reference_inputs, vision_folder

pytestmark = pytest.mark.usefixtures("cache_audit")
COUNT = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
FIRST, SECOND = picture(1), picture(2, 61, 33)
# of one image, of two, without, with another image among the same tokens, and with one at the very end
PROMPTS = [
    asked("look at ", FIRST, ", what is it?"),
    asked(FIRST, " and ", SECOND, " differ. How so?"),
    asked("no image at all here, but a text"),
    asked("look at ", picture(3), ", what is it?"),
    asked("look at ", FIRST),
]
over_families = pytest.mark.parametrize(
    "kind",
    mostly_exhaustive(MARKS, *(kind for kind in MARKS if kind != "qwen2_vl")),  # it is like qwen2_5_vl
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda kind, dtype: vision_folder(kind, tmp_path_factory.mktemp(kind), dtype))


@pytest.fixture(scope="module")
def decoder_of(folders: Any) -> Any:
    @cache
    def decoder(kind: str, dtype: torch.dtype = torch.float32) -> SpeculativeDecoder:
        return SpeculativeDecoder(
            str(folders(kind, dtype)), drafter="none", device="cpu", max_batch_size=3, dtype=str(dtype)[6:]
        )

    return decoder


@dataclass
class RightThenWrong:
    """Proposes 0, 1, 2, ... right tokens of the rows' texts in turn, then wrong ones."""

    texts: Sequence[Sequence[int]]
    rounds: int = 0

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        self.rounds += 1
        proposals = []
        for row, length in zip(rows, lengths, strict=True):
            text = self.texts[row.index][row.num_output_tokens :][:length]
            proposals.append([t if i < (self.rounds + row.index) % 5 else (t + 1) % 300 for i, t in enumerate(text)])
        return Draft.from_lists(proposals, sampler.device)


def rendered(folder: Path, messages: list[dict[str, Any]]) -> str:
    parts = [{"type": "image"} if part["type"] == "image" else part for part in messages[0]["content"]]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    shown = [messages[0] | {"content": parts}]
    return str(tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True))


def test_every_family_is_tested() -> None:
    alike = {"smolvlm": "idefics3"}  # the models differ, but not in how they read images
    assert {alike.get(kind, kind) for kind in FAMILIES} == MARKS.keys()


@pytest.mark.slow
@over_families
def test_prompts_and_texts_are_those_of_transformers(kind: str, folders: Any, decoder_of: Any) -> None:
    folder, decoder = folders(kind, torch.float32), decoder_of(kind)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    for messages, images in (PROMPTS[0], [FIRST]), (PROMPTS[1], [FIRST, SECOND]):
        inputs = reference_inputs(kind, folder, rendered(folder, messages), images)
        (row,) = decoder.rows([messages], GREEDY)
        assert row.tokens == inputs["input_ids"][0].tolist()
        options = {"do_sample": False, "max_new_tokens": COUNT, "eos_token_id": None, "pad_token_id": 0}
        output = model.generate(**inputs, **options, output_logits=True, return_dict_in_generate=True)
        result = decoder.generate(messages, replace(GREEDY, logprobs=0))
        assert result.token_ids == output.sequences[0, len(row.tokens) :].tolist()
        expected = [logits[0].log_softmax(-1).max().item() for logits in output.logits]
        assert [entry.logprob for entry in result.logprobs] == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.each_value
@over_families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_and_batches_change_no_text(kind: str, dtype: torch.dtype, temperature: float, decoder_of: Any) -> None:
    decoder = decoder_of(kind, dtype)
    params = [
        SamplingParams(temperature=temperature, max_tokens=COUNT, ignore_eos=True, seed=i) for i in range(len(PROMPTS))
    ]
    plain = []
    for prompt, options in zip(PROMPTS, params, strict=True):
        decoder.forget()  # each text alone, from its first token on
        plain.append(decoder.generate(prompt, options).token_ids)
    if temperature or kind != "gemma3":  # whose greedy text is the same, so small are the differences
        assert plain[0] != plain[3]  # the same tokens, and other pixels
    assert [result.token_ids for result in decoder.generate(PROMPTS, params)] == plain
    drafter = RightThenWrong(plain)
    drafting = decoder.using(drafter, num_draft_tokens=4, acceptance="match")
    results = drafting.generate(PROMPTS, params)
    assert [result.token_ids for result in results] == plain
    assert sum(result.stats.num_accepted_tokens for result in results) > 0


@pytest.mark.slow
@over_families
def test_the_prefix_cache_knows_pixels(kind: str, decoder_of: Any) -> None:
    decoder = decoder_of(kind)
    decoder.forget()
    first = decoder.generate(PROMPTS[0], GREEDY)
    same, other = (decoder.rows([prompt], GREEDY)[0] for prompt in (PROMPTS[0], PROMPTS[3]))
    assert same.tokens == other.tokens
    start = next(iter(same.images.digests))
    assert decoder.num_cached_tokens(same) == len(same.tokens) - 1
    assert decoder.num_cached_tokens(other) == start
    later = [*PROMPTS[0], {"role": "assistant", "content": first.text}, *asked("and ", SECOND, "?")]
    (row,) = decoder.rows([later], GREEDY)
    assert decoder.num_cached_tokens(row) >= len(same.tokens) - 1
    warm = decoder.generate(later, GREEDY).token_ids
    decoder.forget()
    assert warm == decoder.generate(later, GREEDY).token_ids


@pytest.mark.slow
def test_a_draft_model_reads_the_tokens_alone(folders: Any) -> None:
    folder = str(folders("llava", torch.float32))
    target = SpeculativeDecoder(folder, folder, device="cpu", drafter="model", num_draft_tokens=3)
    rates = [result.stats.acceptance_rate for result in drafted_as_plain(target, PROMPTS, GREEDY)]
    assert rates[2] > 0.9 > rates[1]  # it is the target itself, but for the images


def test_images_come_as_files_and_data_urls(decoder_of: Any, tmp_path: Path) -> None:
    decoder, data = decoder_of("llava"), png(FIRST)
    file = tmp_path / "picture.png"
    file.write_bytes(data)
    url = f"data:image/png;base64,{b64encode(data).decode()}"
    forms = [{"type": "image", "image": image} for image in (FIRST, data, file, url)]
    forms += [{"type": "image_url", "image_url": value} for value in (url, {"url": url, "detail": "low"})]
    texts = [decoder.generate([{"role": "user", "content": [form]}], GREEDY).text for form in forms]
    assert len(set(texts)) == 1
    several = decoder.generate(asked(FIRST), temperature=1.0, n=2, max_tokens=4, seed=1)
    assert several.alternatives[0].token_ids != several.token_ids


def test_a_chat_template_beside_the_tokenizer_is_used(tmp_path: Path) -> None:
    folder = vision_folder("llava", tmp_path)
    file = folder / "chat_template.jinja"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": file.read_text()}))
    file.unlink()
    decoder = SpeculativeDecoder(str(folder), device="cpu", reproducible=False)
    assert decoder.decode(decoder.encode(asked("look ", FIRST))) == "u:look a:"


def test_what_cannot_be_seen_is_refused_in_one_line(decoder_of: Any, folders: Any) -> None:
    decoder = decoder_of("llava")
    for messages, message in (
        ([{"role": "user", "content": [{"type": "image", "image": "http://x/a.png"}]}], "part 0 is a web address"),
        (asked("<image> and ", FIRST), "writes '<image>' 2 times for 1 images; allowed: .* no text that contains"),
        (asked(*[FIRST] * 101), "the conversation has 101 images; allowed: at most 100"),
    ):
        with pytest.raises(UsageError, match=message):
            decoder.generate(messages)
    text_only = SpeculativeDecoder("toy")
    with pytest.raises(UsageError, match="message 0, part 0 is an image, but model 'toy' sees none: it reads text"):
        text_only.generate(asked(FIRST))


def test_other_families_are_refused_by_name(tmp_path: Path) -> None:
    multimodal("Mistral3ForConditionalGeneration").save_pretrained(tmp_path)
    byte_tokenizer("{{ messages }}").save_pretrained(tmp_path)
    decoder = SpeculativeDecoder(str(tmp_path), device="cpu", reproducible=False)
    with pytest.raises(UsageError, match="images are not supported for models of type 'mistral3', only for llava"):
        decoder.generate(asked(FIRST))
