"""Whether two vocabularies fit: reports from loaded models and from folders without weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
from slipstream.wiring.vocabulary_report import PROBES, Finding, VocabularyReport, compare_vocabularies
from tests.support.tiny_models import LETTERS, VOCAB, fresh, tokenizer


def loaded(vocab: int = VOCAB, made: Any = None, **changes: Any) -> Loaded:
    """A tiny model with `vocab` logits and, where given, a tokenizer."""
    return load(fresh("llama", vocab_size=vocab, **changes), LoadOptions(), made)


def about(report: VocabularyReport, subject: str) -> Finding:
    return next(finding for finding in report.findings if finding.subject == subject)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vocabulary")
    model = fresh("llama", vocab_size=VOCAB + 5, eos_token_id=1)
    model.generation_config.eos_token_id = [1, 4]
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


# what is the same, what differs, what follows


def test_two_models_with_one_vocabulary_are_usable_as_is() -> None:
    report = compare_vocabularies(loaded(made=tokenizer()), loaded(made=tokenizer()))
    assert report.usable and report.conclusion == "usable as is"
    assert (report.num_differing, report.differing, report.head_sizes) == (0, (), (VOCAB, VOCAB))
    subjects = ["tokens", "head", "special tokens", "end ids", "encoding", "chat template"]
    assert [finding.subject for finding in report.findings] == subjects
    assert all(finding.same for finding in report.findings)
    assert f"{VOCAB} tokens" in about(report, "tokens").found


@pytest.mark.parametrize(
    ("target", "draft", "conclusion"),
    [
        (VOCAB, VOCAB + 8, "usable: the draft's larger head is cut, and its last 8 ids are never drafted"),
        (VOCAB + 8, VOCAB, "usable: the draft's head is smaller; the target's last 8 ids (0 tokens) are never drafted"),
        (VOCAB, VOCAB - 3, "usable: the draft's head is smaller; the target's last 3 ids (3 tokens) are never drafted"),
    ],
)
def test_heads_of_different_sizes_are_usable_and_the_report_says_which_is_larger(
    target: int, draft: int, conclusion: str
) -> None:
    a, b = loaded(target, tokenizer()), loaded(draft, tokenizer())
    report = compare_vocabularies(a, b)
    assert (report.usable, report.conclusion, report.head_sizes) == (True, conclusion, (target, draft))
    assert about(report, "head").same is False and about(report, "tokens").same is True
    assert same_vocabulary(a, b)
    made = SpeculativeDecoder(a.model, b.model, tokenizer=tokenizer(), num_draft_tokens=3, reproducible=False)
    result = made.generate([5, 6, 7], SamplingParams(max_tokens=12))
    assert all(token < min(target, draft) for round in result.rounds for token in round.draft)
    assert result.token_ids == made.using("none").generate([5, 6, 7], SamplingParams(max_tokens=12)).token_ids


def test_another_vocabulary_is_usable_through_bytes_and_the_report_names_tokens() -> None:
    a, b = loaded(made=tokenizer()), loaded(VOCAB + 6, tokenizer(extra="123456"))
    report = compare_vocabularies(a, b, "the heron saw a fish, and then another one. " * 4)
    assert not same_vocabulary(a, b)
    assert report.usable and report.conclusion == "usable through bytes, verified by match"
    assert report.verdict.startswith("Works, through text") and report.verdict.endswith("about 0.0% extra rejections.")
    assert report.num_differing == 6 and report.differing[0] == f"'1' is absent in the target and {VOCAB} in the draft"
    assert len(report.differing) == 3
    assert "6 tokens differ, first '1' is absent" in about(report, "tokens").found
    assert about(report, "head").follows == "irrelevant, as drafts are translated through their text"
    assert report.bridge is not None and report.bridge.kept == report.bridge.aligned == report.bridge.known == 1
    assert f"{len(LETTERS)}: 100.0% of the target's" in about(report, "shared tokens").found
    assert "0.0% of its tokens rejected" in about(report, "estimated loss").follows


def test_a_vocabulary_without_known_bytes_is_not_usable() -> None:
    inner = Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1, "end": 2, "##s": 3}, unk_token="[UNK]"))
    pieces = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")
    report = compare_vocabularies(loaded(made=tokenizer()), loaded(made=pieces))
    assert not report.usable and report.bridge is None
    assert report.conclusion.startswith("not usable as a draft model: draft 'LlamaForCausalLM' has another vocabulary")
    assert "WordPiece" in report.conclusion and "\n" not in report.conclusion


@pytest.mark.parametrize(
    ("has_target_tokenizer", "has_draft_tokenizer", "lacking"),
    [(0, 1, "target"), (1, 0, "draft"), (0, 0, "target and draft")],
)
@pytest.mark.parametrize("draft", [VOCAB, VOCAB + 1])
def test_without_two_tokenizers_the_heads_decide(
    has_target_tokenizer: bool, has_draft_tokenizer: bool, lacking: str, draft: int
) -> None:
    a, b = (
        loaded(made=tokenizer() if has_target_tokenizer else None),
        loaded(draft, tokenizer() if has_draft_tokenizer else None),
    )
    report = compare_vocabularies(a, b)
    assert report.usable == (draft == VOCAB)
    assert report.verdict.startswith("Works if both have the same tokens, which cannot be checked: the ")
    assert about(report, "tokens").same is None
    assert about(report, "tokens").found == f"the {lacking} came without a tokenizer"
    assert "encoding" not in [finding.subject for finding in report.findings]
    if not report.usable:
        assert report.conclusion.startswith("not usable as a draft model: the heads differ")
        with pytest.raises(UsageError, match=f"has {draft} logits, target .* has {VOCAB}, and no tokenizers"):
            same_vocabulary(a, b)
    else:
        assert same_vocabulary(a, b)


def test_special_tokens_are_compared_by_text_and_id() -> None:
    other = tokenizer()
    other.add_special_tokens({"bos_token": "<unk>", "pad_token": "<eos>"})
    report = compare_vocabularies(loaded(made=tokenizer()), loaded(made=other))
    finding = about(report, "special tokens")
    assert report.usable and finding.same is False
    assert finding.found == (
        "bos is none in the target and '<unk>' (2) in the draft; "
        "pad is '<pad>' (0) in the target and '<eos>' (1) in the draft"
    )
    same = about(compare_vocabularies(loaded(made=other), loaded(made=other)), "special tokens")
    assert same.same and same.found == "bos '<unk>' (2), eos '<eos>' (1), pad '<eos>' (1)"


def test_different_end_ids_of_the_draft_are_reported_but_do_not_matter() -> None:
    report = compare_vocabularies(loaded(made=tokenizer()), loaded(made=tokenizer(), eos_token_id=4))
    ends = about(report, "end ids")
    assert report.usable and report.conclusion == "usable as is"
    assert (ends.same, ends.found) == (False, "[] in the target, [4] in the draft")
    assert ends.follows == "the draft's do not matter, because only the target's end the text"


def cutting(merges: Sequence[tuple[str, str]]) -> HFTokenizer:
    """A byte-pair tokenizer of four tokens; its merges decide where a text is cut."""
    vocabulary = {"x": 0, "1": 1, "2": 2, "12": 3}
    inner = Tokenizer(models.BPE(vocabulary, list(merges)))
    return HFTokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=inner))


def test_tokenizers_that_split_text_differently_are_usable_and_the_report_says_where() -> None:
    whole, single = (VocabularyInfo(name, 4, (), cutting(m)) for name, m in (("a", [("1", "2")]), ("b", [])))
    report = compare_vocabularies(whole, single)
    assert report.usable and report.conclusion == "usable as is"
    assert about(report, "encoding") == Finding(
        "encoding",
        False,
        "digits become other ids",
        "only the target's tokenizer splits text; the draft model, trained on other splits, may guess worse",
    )
    assert about(compare_vocabularies(whole, whole), "encoding").found == f"{', '.join(PROBES)} become the same ids"


@pytest.mark.parametrize(
    ("target", "draft", "same", "expected"),
    [
        ("a:{{ messages[0]['content'] }}", "b:{{ messages[0]['content'] }}", False, "a chat becomes other ids"),
        ("a:", "a:", True, "a chat becomes the same ids"),
        ("a:", None, False, "only the target has one"),
        (None, "a:", False, "only the draft has one"),
        ("a:", "{{ raise_exception('never') }}", False, "a chat becomes other ids"),
        (None, None, None, None),
    ],
)
def test_chat_templates_are_compared_by_their_output(target: Any, draft: Any, same: Any, expected: Any) -> None:
    a, b = (VocabularyInfo("m", VOCAB, (), HFTokenizer(tokenizer(template=template))) for template in (target, draft))
    report = compare_vocabularies(a, b)
    reported = [(finding.same, finding.found) for finding in report.findings if finding.subject == "chat template"]
    assert report.usable and reported == ([] if expected is None else [(same, expected)])


def test_a_text_the_tokenizer_cannot_encode_counts_as_different() -> None:
    class Mute(HFTokenizer):
        def bare(self, text: str) -> list[int]:
            raise ValueError("no unknown token")

    mute = VocabularyInfo("m", VOCAB, (), Mute(tokenizer()))
    report = compare_vocabularies(mute, mute)
    assert report.usable and about(report, "encoding").same is False


def test_a_report_can_be_written_as_json_and_lines() -> None:
    report = compare_vocabularies(load("toy", LoadOptions()), loaded(made=tokenizer()))
    values = json.loads(json.dumps(report.to_dict()))
    assert values["usable"] is True and values["head_sizes"] == [257, VOCAB]
    assert values["bridge"]["shared"] == len(LETTERS) and 0 < values["bridge"]["known"] < 1
    assert [finding["subject"] for finding in values["findings"]] == [finding.subject for finding in report.findings]
    first, *others = report.lines()
    assert first == f"draft 'LlamaForCausalLM' for target 'toy': {report.conclusion}"
    assert len(others) == 2 * len(report.findings) and not any("\n" in printed for printed in others)
    for finding, line, follows in zip(report.findings, others[::2], others[1::2], strict=True):
        mark = finding.amount or {True: "same", False: "different", None: "unknown"}[finding.same]
        assert line.split()[: len(finding.subject.split()) + 1] == [*finding.subject.split(), mark]
        assert line.endswith(finding.found) and follows.strip() == finding.follows


# without weights


def test_a_folder_is_inspected_as_it_would_be_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load(str(folder), LoadOptions(fast=False))
    expected = VocabularyInfo.of(whole)
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained", None
    )  # from here on, loading weights raises
    info = inspect_vocabulary(str(folder))
    assert (info.name, info.head_size, info.end_ids) == (expected.name, VOCAB + 5, (1, 4))
    assert info.end_ids == expected.end_ids and info.special == expected.special != {}
    report = compare_vocabularies(info, whole)
    assert report.conclusion == "usable as is" and all(finding.same for finding in report.findings)
    assert report.verdict.startswith("Works: ") and report.verdict.endswith(
        "have the same tokens. No extra rejections."
    )
    assert compare_vocabularies(info, info).verdict.startswith("Works, but hardly saves time: ")


def test_a_folder_without_weights_tokenizer_or_generation_config_is_inspected(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    info = inspect_vocabulary(str(tmp_path))
    assert (info.head_size, info.end_ids, info.tokenizer, info.special) == (VOCAB + 5, (1,), None, {})


def test_the_toy_is_inspected() -> None:
    info = inspect_vocabulary("toy:2")
    assert (info.name, info.head_size, info.end_ids) == ("toy:2", 257, (256,))
    assert compare_vocabularies(inspect_vocabulary("toy"), info).conclusion == "usable as is"


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
    assert report.usable and str(report).splitlines() == report.lines() and len(report.lines()) > 3
    assert report.lines()[0] == f"draft 'toy' for target 'toy': {report.conclusion}"
    with pytest.raises(UsageError, match="nowhere"):
        slipstream.check_pair("toy", "./nowhere")
