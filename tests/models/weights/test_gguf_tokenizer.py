"""A GGUF file's tokenizer splits text as the file says, keeps whole tokens whole, and ends answers where turns end."""

from __future__ import annotations

import json
import logging
import random
import shutil
import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from slipstream.errors import SlipstreamError
from slipstream.models.weights.default_model import embedded_model
from slipstream.models.weights.gguf_configuration import described
from slipstream.models.weights.gguf_file import read_header
from slipstream.models.weights.gguf_tokenizer import SPLITS, read_tokenizer
from slipstream.models.weights.model_files import CONVERSION, is_converted
from slipstream.models.weights.resolve import resolve
from slipstream.models.weights.tokenizer_loading import inspect_vocabulary, load_tokenizer
from slipstream.tokenization.hf_tokenizer import HFTokenizer
from slipstream.tokenization.vocabulary import VocabularyInfo
from tests.support.chat_templates import FETCHED
from tests.support.gguf_files import ALPHABET, byte_level, write_model
from tests.support.markers import needs_transformers, subcases

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = "don't   7 12345 x\n\n1 Ⅳ ४५ 日本語, «ok»!  \t end  CamelCase naïve e\u0301 'S x=1;//\n\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """An empty cache folder, except for the default model, which is in the user's."""
    if request.node.get_closest_marker("smollm2") is None:
        monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path / "cache"))
    return tmp_path / "cache"


def info_of(
    folder: Path, tokenizer: Callable[[Any], None], name: str = "llama", template: str | None = None, **values: bool
) -> VocabularyInfo:
    """The vocabulary of a file with this tokenizer. values: flags of tokenizer.ggml."""

    def more(writer: Any) -> None:
        for key, value in values.items():
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        if template is not None:
            writer.add_chat_template(template)

    write_model(folder / "some.gguf", name, tokenizer=tokenizer, more=more, vocab_size=300, pad_token_id=None)
    return inspect_vocabulary(str(folder / "some.gguf"))


def tokens(info: VocabularyInfo, text: str) -> list[str]:
    """The tokens of a text as the vocabulary spells them."""
    assert isinstance(info.tokenizer, HFTokenizer)
    return spelled(info.tokenizer, info.tokenizer.encode(text))


def spelled(tokenizer: HFTokenizer, ids: Iterable[int]) -> list[str]:
    return [tokenizer.inner.backend_tokenizer.id_to_token(number) for number in ids]


@pytest.mark.slow
@subcases(
    "pre, text, words",
    [
        ("smollm", "\n\n1.  7", ["ĊĊ", "1", ".", "ĠĠ", "7"]),
        ("gpt-2", "\n\n1.  7", ["Ċ", "Ċ", "1", ".", "Ġ", "Ġ7"]),
        ("default", "1234a", ["123", "4", "a"]),
        ("llama-bpe", "12345 I'LL", ["123", "45", "ĠI", "'LL"]),
        ("qwen2", "12 a\n\n", ["1", "2", "Ġa", "ĊĊ"]),
        ("tekken", "aBc12/\n", ["a", "Bc", "1", "2", "/Ċ"]),
        ("gpt-4o", "aBc don't 1234", ["a", "Bc", "Ġdon't", "Ġ", "123", "4"]),
        ("deepseek-v3", "(x) 日本1234", ["(x", ")", "Ġ", "æĹ¥æľ¬", "123", "4"]),
        ("deepseek-llm", "ab 日本 12", ["ab", "Ġ", "æĹ¥æľ¬", "Ġ", "12"]),
        ("tiny_aya", "1234567", ["1", "234", "567"]),
        ("afmoe", "12345", ["12", "345"]),
        ("kimi-k2", "a日本b", ["a", "æĹ¥æľ¬", "b"]),
        ("bloom", "a,b 1x", ["a", ",", "b", "Ġ1x"]),
        ("command-r", "12 a", ["1", "2", "Ġa"]),
    ],
)
def test_text_is_split_as_the_file_says(pre: str, text: str, words: list[str], tmp_path: Path) -> None:
    info = info_of(tmp_path, byte_level(pre, {"<end>": 3}, eos="<end>"))
    assert isinstance(info.tokenizer, HFTokenizer)
    split = info.tokenizer.inner.backend_tokenizer.pre_tokenizer
    assert [word for word, _ in split.pre_tokenize_str(text)] == words


def test_no_splitting_rule_loses_a_character() -> None:
    pieces = {
        name: [word for word, _ in pre_tokenizers.Sequence(parts).pre_tokenize_str(TEXT)]
        for name, split in SPLITS.items()
        if (parts := [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns])
    }
    assert all("".join(words) == TEXT for words in pieces.values())
    assert len({tuple(words) for words in pieces.values()}) > 20


def test_an_unknown_splitting_rule_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        SlipstreamError, match=r"some\.gguf': tokenizer\.ggml\.pre is 'smolm', .*did you mean 'smollm'\? allowed: \S"
    ) as error:
        info_of(tmp_path, byte_level("smolm"))
    assert "\n" not in str(error.value)


def test_a_file_without_a_splitting_rule_gets_the_default_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "slipstream"):
        info = info_of(tmp_path, byte_level(None, {"<end>": 3}, eos="<end>"))
        inspect_vocabulary(str(tmp_path / "some.gguf"))
        resolve(str(tmp_path / "some.gguf"))
    assert sum("does not say how text is split" in record.message for record in caplog.records) == 3  # once per call
    assert tokens(info, "\n\n1") == ["Ċ", "Ċ", "1"]


def test_a_word_that_is_a_token_stays_whole_where_the_rule_says_so(tmp_path: Path) -> None:
    for pre, expected in (("llama-bpe", ["xyz"]), ("qwen2", ["xy", "z"])):
        info = info_of(tmp_path, byte_level(pre, {"xyz": 1}, merges=("x y", "Ċ Ċ")))
        assert tokens(info, "xyz") == expected


def test_characters_are_composed_where_the_original_tokenizer_composes_them(tmp_path: Path) -> None:
    for pre, expected in (("qwen2", ["Ã", "©"]), ("gpt-2", ["e", "Ì", "ģ"])):
        assert tokens(info_of(tmp_path, byte_level(pre)), "e\u0301") == expected


def test_the_start_token_follows_the_file_or_else_the_rule(tmp_path: Path) -> None:
    vocabulary = {"<start>": 3, "<end>": 3}
    for pre, flags, first in (
        ("llama-bpe", {}, "<start>"),
        ("llama-bpe", {"add_bos_token": False}, "a"),
        ("qwen2", {}, "a"),
        ("qwen2", {"add_bos_token": True}, "<start>"),
    ):
        info = info_of(tmp_path, byte_level(pre, vocabulary, bos="<start>", eos="<end>"), **flags)
        assert tokens(info, "a")[0] == first


def test_special_tokens_of_any_characters_stay_whole(tmp_path: Path) -> None:
    added = {"<｜User｜>": 3, "<｜end｜>": 3, "<think>": 4}  # noqa: RUF001
    info = info_of(tmp_path, byte_level("deepseek-v3", added, eos="<｜end｜>"))  # noqa: RUF001
    assert tokens(info, "<｜User｜>a<think>") == ["<｜User｜>", "a", "<think>"]  # noqa: RUF001
    assert isinstance(info.tokenizer, HFTokenizer)
    assert len(info.tokenizer.vocabulary()) == len(ALPHABET) + 2 + 3  # no token is added to those of the file
    assert info.end_ids == (len(ALPHABET) + 2 + 1,)
    assert info.tokenizer.decode(info.tokenizer.encode("<｜User｜>a<think>")) == "a<think>"  # noqa: RUF001


def test_a_tokenizer_class_of_transformers_does_not_change_the_split(tmp_path: Path) -> None:
    info_of(tmp_path, byte_level("gpt-2", {"<end>": 3}, eos="<end>"), name="qwen2")
    folder = described(read_header(tmp_path / "some.gguf"))
    loaded = load_tokenizer("some", str(folder))
    assert loaded is not None and spelled(loaded, loaded.encode("\n\n1")) == ["Ċ", "Ċ", "1"]
    other = AutoTokenizer.from_pretrained(folder)  # negative control: Qwen2's own split, whatever the folder says
    assert other.convert_ids_to_tokens(other("\n\n1")["input_ids"]) == ["ĊĊ", "1"]


def sentencepiece(*added: str) -> Callable[[Any], None]:
    """Writes a vocabulary of SentencePiece. added: tokens; those in angle brackets are special."""

    def write(writer: Any) -> None:
        words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", *added]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(words)
        writer.add_token_scores([-float(number) for number in range(len(words))])
        writer.add_token_types([2, 3, 3, *[6] * 256, 1, 1, 1, *(3 if word[0] == "<" else 1 for word in added)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    return write


@pytest.mark.parametrize("prefix", [True, False])
def test_a_space_is_put_before_a_text_if_the_file_says_so(prefix: bool, tmp_path: Path) -> None:
    info = info_of(tmp_path, sentencepiece(), add_space_prefix=prefix)
    assert tokens(info, "a") == (["<s>", "▁a"] if prefix else ["<s>", "a"])
    assert info.tokenizer is not None and info.tokenizer.decode(info.tokenizer.encode("a")) == "a"


PIECES = ("▁", "a", "b", "c", "▁a", "ab", "▁ab", "abc", "bc", "aa", ".", "\n", "▁b", "é", "<start_of_turn>", "<mask>")


@needs_transformers("5.23", "reading of SentencePiece")
@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma3", "gemma4"])
def test_sentencepiece_is_what_transformers_builds(architecture: str, tmp_path: Path) -> None:
    file, is_gemma = tmp_path / "vocabulary.gguf", "gemma" in architecture
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>"] if is_gemma else ["<unk>", "<s>", "</s>"]
    spaces = ["  ", "    "] if architecture == "gemma3" else ["▁▁", "▁▁▁▁"]
    words = [*pieces, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, *spaces, "<think>"]
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_tokenizer_model("gemma4" if architecture == "gemma4" else "llama")
    writer.add_token_list(words)
    writer.add_token_scores([-float(number // 2) for number in range(len(words))])  # some are equal
    kinds = [3] * len(pieces) + [6] * 256 + [3 if "start" in word else 1 for word in PIECES]
    writer.add_token_types([*kinds, 4, 1, 4])
    if architecture == "gemma4":
        writer.add_token_merges(["a b", "ab c", "▁ a", "▁ ▁", "▁▁ ▁▁"])
    writer.add_bos_token_id(words.index(pieces[-2]))
    writer.add_unk_token_id(words.index("<unk>"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    built, reference = (
        read_tokenizer(read_header(file)),
        PreTrainedTokenizerFast.from_pretrained(tmp_path, gguf_file=file.name),
    )
    if architecture == "llama":  # as the tokenizer.json of Llama 2; transformers has newer rules for a file
        reference.backend_tokenizer.pre_tokenizer = None
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        reference.backend_tokenizer.normalizer = normalizers.Sequence(steps)
    assert built is not None and len(built) == len(reference) == len(words)
    for text in (
        "abc ab  aa.",
        " a\n\n b    c",
        "",
        "  ",
        "<start_of_turn>ab<think> a<mask>é日<eos></s>",
        "abcabc aabc",
    ):
        ids = built(text, add_special_tokens=False)["input_ids"]
        assert ids == reference(text, add_special_tokens=False)["input_ids"], text
        assert built.decode(ids) == reference.decode(ids)
    assert built.special_tokens_map == reference.special_tokens_map
    special, expected = (
        {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        for tokenizer in (built, reference)
    )
    assert special == expected


def test_each_piece_between_whole_tokens_begins_with_a_space(tmp_path: Path) -> None:
    """As in llama.cpp, and in the tokenizers with which Llama 2 and the first Mistral were published."""
    info = info_of(tmp_path, sentencepiece("<|user|>", "▁▁", "▁▁a"))
    assert tokens(info, "a<|user|>a") == ["<s>", "▁a", "<|user|>", "▁a"]
    assert tokens(info, " a") == ["<s>", "▁▁a"]
    assert tokens(info, "<|user|> ") == ["<s>", "<|user|>", "▁▁"]


def test_space_after_the_special_tokens_of_phi_3_is_not_read(tmp_path: Path) -> None:
    info = info_of(tmp_path, sentencepiece("<|user|>"), name="phi3")
    assert tokens(info, "<|user|>\n a</s> <s> a") == ["<s>", "<|user|>", "▁a", "</s>", "<s>", "▁", "▁a"]


VOCABULARIES = (
    *("command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe", "llama-spm"),
    *("mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_texts_have_the_tokens_that_llama_cpp_expects(name: str) -> None:
    """llama.cpp tests its tokenizers with these vocabularies and texts."""
    file = FETCHED / f"ggml-vocab-{name}.gguf"
    if not file.is_file():
        pytest.skip("needs .clients/chat_templates: make clients")
    tokenizer = read_tokenizer(read_header(file))
    assert tokenizer is not None
    texts = file.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    expected = file.with_suffix(".gguf.out").read_text(encoding="utf-8").splitlines()
    wrong = {
        text: (ids, line)
        for text, line in zip(texts, expected, strict=False)
        if unicodedata.is_normalized("NFC", text)  # llama.cpp does not compose characters
        and (ids := tokenizer(text, add_special_tokens=False)["input_ids"]) != [int(number) for number in line.split()]
    }
    assert len(texts) > 40 and not wrong


# without Unicode's own spaces: llama.cpp takes some of them for letters where the models' tokenizers do not
SCRIPTS = (
    *("don't", "I'M", "we'Ve", "Hello", "camelCase", "naïve", "1", "123", "12345", "½", "Ⅳ", "४५", " ", "  ", "\t"),
    *("\n", "\n\n", "\r\n", ".", "...", "->", "//", "(x)", "#", "_", '"', "«", "、", "日本語", "かな", "한국어"),
    *("привет", "Ελλάδα", "שלום", "مرحبا", "ไทย", "हिन्दी", "é", "🙂", "👩\u200d👧", "ǅ", "№", "\ufeff"),
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", (*VOCABULARIES, "aquila", "baichuan", "gpt-neox"))
def test_random_texts_have_the_tokens_that_llama_cpp_gives_them(name: str) -> None:
    """Special tokens among them, which a chat template would write."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    file = FETCHED / f"ggml-vocab-{name}.gguf"
    if not file.is_file():
        pytest.skip("needs .clients/chat_templates: make clients")
    tokenizer = read_tokenizer(read_header(file))
    assert tokenizer is not None
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    draw = random.Random(0)
    parts = [*SCRIPTS, *sorted(special)[:20]]
    texts = ["".join(draw.choices(parts, k=draw.randrange(1, 14))) for _ in range(700)]
    reference = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    wrong = [
        text
        for text in texts
        if unicodedata.is_normalized("NFC", text)  # llama.cpp does not compose characters
        and tokenizer(text, add_special_tokens=False)["input_ids"]
        != reference.tokenize(text.encode(), add_bos=False, special=True)
    ]
    assert not wrong


def test_other_kinds_of_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"tokenizer\.ggml\.model is 't5'; allowed: gpt2, llama, gemma4"):
        info_of(tmp_path, lambda writer: writer.add_tokenizer_model("t5"))


def test_a_chat_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "some.gguf", more=lambda writer: writer.add_bool("tokenizer.chat_template", True))
    with pytest.raises(SlipstreamError, match=r"tokenizer\.chat_template is True; allowed: a text"):
        inspect_vocabulary(str(tmp_path / "some.gguf"))


TURNS = {"<|endoftext|>": 3, "<|im_start|>": 3, "<|im_end|>": 3, "<stop>": 3}
HARMONY = {"<|return|>": 3, "<|call|>": 3, "<|end|>": 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("added", "ids", "template", "ends"),
    [
        (TURNS, {"eos": "<|endoftext|>"}, CHATML, {"<|endoftext|>", "<|im_end|>"}),
        (TURNS, {"eos": "<|im_end|>", "eot": "<stop>"}, None, {"<|im_end|>", "<|endoftext|>", "<stop>"}),
        (TURNS, {"eos": "<|im_end|>", "eom": "<stop>"}, None, {"<|im_end|>", "<|endoftext|>", "<stop>"}),
        ({"<stop>": 3, "<done>": 3}, {"eos": "<done>"}, CHATML.replace("<|im_end|>", "<stop>"), {"<done>", "<stop>"}),
        ({"<done>": 3}, {"eos": "<done>"}, "{{ raise_exception('no') }}", {"<done>"}),
        (HARMONY, {"eos": "<|return|>"}, None, {"<|return|>", "<|call|>"}),
        ({"<eos>": 3, "</s>": 4}, {"eos": "<eos>"}, None, {"<eos>"}),  # a whole token, but one of HTML
        ({"<eos>": 3, "</s>": 3}, {"eos": "<eos>"}, None, {"<eos>", "</s>"}),
        ({"<eos>": 3, "<|tool_response>": 4}, {"eos": "<eos>"}, None, {"<eos>", "<|tool_response>"}),  # Gemma 4's
        ({"<eos>": 3, "<|im_end|>": 1}, {"eos": "<eos>"}, None, {"<eos>", "<|im_end|>"}),  # of files made carelessly
    ],
)
def test_answers_end_at_every_token_that_ends_a_turn(
    added: dict[str, int], ids: dict[str, str], template: str | None, ends: set[str], tmp_path: Path
) -> None:
    info = info_of(tmp_path, byte_level("smollm", added, **ids), template=template)
    assert isinstance(info.tokenizer, HFTokenizer)
    assert set(spelled(info.tokenizer, info.end_ids)) == ends
    assert info.tokenizer.decode(info.end_ids) == ""  # no answer shows them
    assert info.tokenizer.inner.special_tokens_map["eos_token"] == ids["eos"]


def test_a_loaded_model_has_the_end_tokens_of_its_vocabulary(tmp_path: Path) -> None:
    from slipstream.models.load import load
    from slipstream.models.loaded import LoadOptions

    info = info_of(tmp_path, byte_level("smollm", TURNS, eos="<|endoftext|>"), template=CHATML)
    for options in (LoadOptions(), LoadOptions("float32"), LoadOptions(fast=False)):
        loaded = load(str(tmp_path / "some.gguf"), options)
        assert set(loaded.end_ids) == set(info.end_ids) and len(info.end_ids) == 2


def test_a_conversion_of_an_older_version_is_repeated(tmp_path: Path, cache: Path) -> None:
    cache.mkdir()
    write_model(tmp_path / "some.gguf", tokenizer=byte_level("smollm", TURNS, eos="<|im_end|>"), vocab_size=300)
    shutil.copy(tmp_path / "some.gguf", cache / "named.gguf")
    folders = [Path(resolve(str(tmp_path / "some.gguf"))), cache / "named"]
    folders[1].mkdir()
    for folder in folders:
        (folder / CONVERSION).unlink(missing_ok=True)
        (folder / "config.json").write_text("{}")
        (folder / "added_tokens.json").write_text("{}")
    for name, folder in zip((str(tmp_path / "some.gguf"), "named"), folders, strict=True):
        assert Path(resolve(name)) == folder and is_converted(folder)
        assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
        assert not (folder / "added_tokens.json").exists()
        loaded = load_tokenizer(name, str(folder))
        assert loaded is not None and spelled(loaded, loaded.encode("\n\n1")) == ["ĊĊ", "1"]
        before = (folder / "config.json").stat().st_mtime_ns
        assert Path(resolve(name)) == folder and (folder / "config.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_damaged_conversion_is_refused_with_what_to_delete(content: str, tmp_path: Path) -> None:
    from slipstream.models.load import load
    from slipstream.models.loaded import LoadOptions

    info_of(tmp_path, byte_level("smollm", TURNS, eos="<|endoftext|>"))
    folder = Path(resolve(str(tmp_path / "some.gguf")))
    described = next(folder.parent.glob("gguf/*/config.json"), folder / "config.json")
    described.write_text(content)
    with pytest.raises(SlipstreamError, match=r"config\.json could not be read: .*; delete the folder"):
        load(str(tmp_path / "some.gguf"), LoadOptions())


@pytest.mark.smollm2
def test_the_default_model_splits_digits_and_spaces_as_in_its_training() -> None:
    loaded = load_tokenizer("smollm2", str(embedded_model()))
    assert loaded is not None
    assert [loaded.encode(text) for text in ("\n\n1", "   7")] == [[1116, 33], [333, 39]]
    # the original splits off single digits, then GPT-2's words
    original = loaded.inner.backend_tokenizer.from_str(loaded.inner.backend_tokenizer.to_str())
    original.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    text = TEXT + Path(__file__).read_text()
    assert loaded.encode(text) == original.encode(text).ids
    original.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # negative control: GPT-2's words alone
    assert loaded.encode(text) != original.encode(text).ids
