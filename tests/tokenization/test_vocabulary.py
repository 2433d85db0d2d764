"""Whether two vocabularies fit: reports from loaded models and from folders without weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models

import slipstream
from slipstream import SamplingParams, SlipstreamError, SpeculativeDecoder, UsageError
from slipstream.models.load import load
from slipstream.models.loaded import Loaded, LoadOptions
from slipstream.models.weights.tokenizer_loading import inspect_vocabulary
from slipstream.tokenization.hf_tokenizer import HFTokenizer
from slipstream.tokenization.vocabulary import VocabularyInfo, same_vocabulary
from slipstream.wiring.vocabulary_report import compare_vocabularies
from tests.support.tiny_models import LETTERS, VOCAB, fresh, tokenizer


def loaded(vocab: int = VOCAB, made: Any = None, **changes: Any) -> Loaded:
    """A tiny model with `vocab` logits and, where given, a tokenizer."""
    return load(fresh("llama", vocab_size=vocab, **changes), LoadOptions(), made)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vocabulary")
    model = fresh("llama", vocab_size=VOCAB + 5, eos_token_id=1)
    model.generation_config.eos_token_id = [1, 4]
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


# what is the same, what differs, what follows


def test_two_models_with_one_vocabulary_fit() -> None:
    report = compare_vocabularies(loaded(made=tokenizer()), loaded(made=tokenizer()))
    name = "'LlamaForCausalLM'"
    assert str(report) == f"Works: {name} and {name} have the same tokens. No extra rejections."
    assert report.usable and report.bridge is None


def test_a_head_that_shares_the_targets_tokenizer_is_not_compared_token_by_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = loaded(made=tokenizer())
    monkeypatch.setattr(HFTokenizer, "vocabulary", lambda tokenizer: pytest.fail("listed its tokens"))
    assert same_vocabulary(target, replace(target, name="head"))


@pytest.mark.parametrize(
    ("target", "draft", "note"),
    [
        (VOCAB, VOCAB + 8, ()),
        (VOCAB + 8, VOCAB, ()),
        (VOCAB, VOCAB - 3, (f"The draft has {VOCAB - 3} logits, so the target's last 3 tokens are never drafted.",)),
    ],
)
def test_heads_of_different_sizes_fit_and_tokens_that_are_never_drafted_are_noted(
    target: int, draft: int, note: tuple[str, ...]
) -> None:
    a, b = loaded(target, tokenizer()), loaded(draft, tokenizer())
    report = compare_vocabularies(a, b)
    assert report.usable and report.notes == note
    assert same_vocabulary(a, b)
    made = SpeculativeDecoder(a.model, b.model, tokenizer=tokenizer(), num_draft_tokens=3, reproducible=False)
    result = made.generate([5, 6, 7], SamplingParams(max_tokens=12))
    assert all(token < min(target, draft) for round in result.rounds for token in round.draft)
    assert result.token_ids == made.using("none").generate([5, 6, 7], SamplingParams(max_tokens=12)).token_ids


def test_another_vocabulary_fits_through_text_and_the_report_names_tokens() -> None:
    a, b = loaded(made=tokenizer()), loaded(VOCAB + 6, tokenizer(extra="123456"))
    report = compare_vocabularies(a, b, "the heron saw a fish, and then another one. " * 4)
    assert not same_vocabulary(a, b)
    assert report.usable and report.verdict.startswith("Works, through text")
    assert report.verdict.endswith("about 0.0% extra rejections.")
    assert report.bridge is not None and report.bridge.kept == 1 and report.bridge.shared == len(LETTERS)
    tokens, shared = report.notes
    assert tokens.startswith(f"6 tokens differ, first '1' is absent in the target and {VOCAB} in the draft")
    assert f"only the {len(LETTERS)} tokens that both have are drafted" in shared
    assert json.loads(json.dumps(report.to_dict()))["bridge"]["kept"] == 1


def test_a_vocabulary_without_known_bytes_is_not_usable() -> None:
    inner = Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1, "end": 2, "##s": 3}, unk_token="[UNK]"))
    pieces = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")
    report = compare_vocabularies(loaded(made=tokenizer()), loaded(made=pieces))
    assert not report.usable and report.bridge is None
    assert report.verdict.startswith("draft 'LlamaForCausalLM' has another vocabulary")
    assert "WordPiece" in report.verdict and "\n" not in str(report)


@pytest.mark.parametrize(
    ("has_target_tokenizer", "has_draft_tokenizer", "lacking"),
    [(0, 1, "target"), (1, 0, "draft"), (0, 0, "target and draft")],
)
@pytest.mark.parametrize("draft", [VOCAB, VOCAB + 1])
def test_without_two_tokenizers_the_heads_decide(
    has_target_tokenizer: bool, has_draft_tokenizer: bool, lacking: str, draft: int
) -> None:
    a = loaded(made=tokenizer() if has_target_tokenizer else None)
    b = loaded(draft, tokenizer() if has_draft_tokenizer else None)
    report = compare_vocabularies(a, b)
    assert report.usable == (draft == VOCAB) and f"the {lacking} came without a tokenizer" in report.verdict
    if not report.usable:
        assert report.verdict.endswith(f"{VOCAB} and {draft} logits; nothing shows that ids mean the same")
        with pytest.raises(UsageError, match=f"has {draft} logits, target .* has {VOCAB}, and no tokenizers"):
            same_vocabulary(a, b)
    else:
        assert report.verdict.startswith("Works if both have the same tokens, which cannot be checked: the ")
        assert same_vocabulary(a, b)


def cutting(merges: Sequence[tuple[str, str]]) -> HFTokenizer:
    """A byte-pair tokenizer of four tokens; its merges decide where a text is cut."""
    vocabulary = {"x": 0, "1": 1, "2": 2, "12": 3}
    inner = Tokenizer(models.BPE(vocabulary, list(merges)))
    return HFTokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=inner))


class Mute(HFTokenizer):
    def bare(self, text: str) -> list[int]:
        raise ValueError("no unknown token")


def test_tokenizers_that_split_text_differently_fit_with_a_note() -> None:
    whole, single = (VocabularyInfo(name, 4, (), cutting(m)) for name, m in (("a", [("1", "2")]), ("b", [])))
    mute = VocabularyInfo("m", VOCAB, (), Mute(tokenizer()))
    for target, draft in ((whole, single), (mute, mute)):
        report = compare_vocabularies(target, draft)
        assert report.usable and report.notes[0].startswith("The tokenizers split text differently")
    assert compare_vocabularies(whole, whole).notes == ()


# without weights


def test_a_folder_is_inspected_as_it_would_be_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load(str(folder), LoadOptions(fast=False))
    expected = VocabularyInfo.of(whole)
    # from here on, loading weights raises
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    info = inspect_vocabulary(str(folder))
    assert (info.name, info.head_size, info.end_ids) == (expected.name, VOCAB + 5, (1, 4))
    assert info.end_ids == expected.end_ids
    report = compare_vocabularies(info, whole)
    assert report.verdict.startswith("Works: ") and report.verdict.endswith("the same tokens. No extra rejections.")
    assert compare_vocabularies(info, info).verdict.startswith("Works, but hardly saves time: ")


def test_a_folder_without_weights_tokenizer_or_generation_config_is_inspected(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    info = inspect_vocabulary(str(tmp_path))
    assert (info.head_size, info.end_ids, info.tokenizer) == (VOCAB + 5, (1,), None)


def test_the_toy_is_inspected() -> None:
    info = inspect_vocabulary("toy:2")
    assert (info.name, info.head_size, info.end_ids) == ("toy:2", 257, (256,))
    assert compare_vocabularies(inspect_vocabulary("toy"), info).usable


def test_the_head_size_of_a_multimodal_model_is_that_of_its_text_part(tmp_path: Path) -> None:
    text = transformers.Gemma3TextConfig(vocab_size=77, eos_token_id=3, bos_token_id=2, pad_token_id=0)
    transformers.Gemma3Config(text_config=text.to_dict()).save_pretrained(tmp_path)
    assert inspect_vocabulary(str(tmp_path)).head_size == 77


def test_a_gguf_file_is_read_without_its_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf")
    file = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    words = ["<unk>", "<s>", "</s>", "\u2581a", "b"]
    for name, number in (("context_length", 64), ("embedding_length", 16), ("block_count", 1), ("head_count", 2)):
        getattr(writer, f"add_{name}")(number)
    writer.add_feed_forward_length(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0, 0.0, 0.0, -1.0, -2.0])
    writer.add_token_types([2, 3, 3, 1, 1])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    info = inspect_vocabulary(str(file))
    assert (info.head_size, info.end_ids) == (5, (2,))
    assert info.tokenizer is not None and set(words) <= info.tokenizer.vocabulary().keys()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/no/such/folder", "is not a folder"),
        ("no/such.gguf", "does not exist; allowed"),
        ("toy:x", "allowed: 'toy' or 'toy:ORDER'"),
        ("nobody/nothing", "could not be downloaded from the Hugging Face Hub"),
    ],
)
def test_a_source_that_is_not_a_model_is_refused_in_one_line(source: str, message: str) -> None:
    with pytest.raises(SlipstreamError, match=message) as error:
        inspect_vocabulary(source)
    assert source in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("broken", ["config.json", "generation_config.json", "tokenizer.json", "x.gguf"])
def test_a_damaged_file_is_refused_in_one_line(folder: Path, tmp_path: Path, broken: str) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / broken).write_bytes(b"not what it should be")
    source = str(tmp_path / broken) if broken == "x.gguf" else str(tmp_path)
    with pytest.raises(SlipstreamError, match=r"could not be|is not a GGUF file") as error:
        inspect_vocabulary(source)
    assert source in str(error.value) and "\n" not in str(error.value)


def test_decode_equals_transformers_even_if_a_tokenizer_overrides_it() -> None:
    class Own(transformers.PreTrainedTokenizerFast):  # type: ignore[misc]
        def _decode(self, *arguments: Any, **options: Any) -> str:
            return super()._decode(*arguments, **options).upper()

    ids = [3, 0, 5, 1, 2, 7]
    plain, overriding = tokenizer(), Own(tokenizer_object=tokenizer().backend_tokenizer, pad_token="<pad>")
    for inner in (plain, overriding):
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        assert HFTokenizer(inner).decode(ids) == inner.decode(ids, **options)
    assert HFTokenizer(overriding).decode(ids) != HFTokenizer(plain).decode(ids)


def test_a_pair_is_checked_by_its_names() -> None:
    report = slipstream.check_pair("toy", "toy")
    assert report.usable and "'toy' have the same tokens" in str(report)
    with pytest.raises(UsageError, match="nowhere"):
        slipstream.check_pair("toy", "./nowhere")
