"""The prompt set that comes with the package, and prompts from files."""

import json
from collections import Counter
from importlib import resources
from pathlib import Path

import pytest

from slipstream.errors import UsageError
from slipstream.text.prompt_sets import NamedPrompt, builtin_prompts, read_prompts, spread, titles

FAMILIES = ("chat", "code", "code edit", "summary", "question answering", "translation", "maths", "extraction")


def lines() -> list[dict[str, object]]:
    text = resources.files("slipstream").joinpath("data/prompts.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_the_prompt_set_has_eight_families_of_five_prompts() -> None:
    assert Counter(p.category for p in builtin_prompts()) == dict.fromkeys(FAMILIES, 5)


def test_every_line_has_the_public_format() -> None:
    assert [line["question_id"] for line in lines()] == list(range(1, 41))
    for line in lines():
        assert set(line) == {"question_id", "category", "turns"}
        assert isinstance(line["turns"], list) and len(line["turns"]) == 1


def test_built_in_prompts_are_unique_and_of_usual_length() -> None:
    texts = [p.prompt for p in builtin_prompts()]
    assert len(set(texts)) == len(texts) and all(text == text.strip() for text in texts)
    assert all(20 <= len(text.split()) <= 300 for text in texts)


def test_prompts_about_a_text_have_at_least_forty_words() -> None:
    grounded = ("code edit", "summary", "question answering", "translation", "extraction")
    assert all(len(p.prompt.split()) >= 40 for p in builtin_prompts() if p.category in grounded)


def test_prompts_of_one_category_are_told_apart_by_their_first_words(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Name ten rivers of Europe."}\n{"prompt": "Name a bird."}\n')
    prompts = read_prompts(file)
    assert titles(prompts, 20) == ["Name ten rivers ...", "Name a bird."]
    assert titles([*prompts, NamedPrompt("What is 2 + 2?", "maths"), NamedPrompt("Say hi.")]) == [
        *("prompts", "prompts", "maths", "Say hi.")
    ]


def test_families_and_limits_choose_from_the_set() -> None:
    chosen = builtin_prompts(categories=["maths", "chat"], limit=2)
    assert Counter(p.category for p in chosen) == {"maths": 2, "chat": 2}
    assert chosen[0].prompt == builtin_prompts(categories=["chat"])[0].prompt


def test_an_unknown_family_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"category 'poetry' is not in .*allowed: chat, code, code edit"):
        builtin_prompts(categories=["poetry"])


def test_spread_takes_every_family() -> None:
    assert {p.category for p in spread(builtin_prompts(), 8)} == set(FAMILIES)


def test_prompt_files_may_be_json_lines_or_plain_text(tmp_path: Path) -> None:
    lines = tmp_path / "own.jsonl"
    lines.write_text('{"turns": ["one", "ignored"], "category": "a"}\n\n{"prompt": "two"}\n')
    assert [(p.prompt, p.category) for p in read_prompts(lines)] == [("one", "a"), ("two", "own")]
    plain = tmp_path / "plain.txt"
    plain.write_text("  a text\nof two lines ")
    assert [(p.prompt, p.category) for p in read_prompts(plain)] == [("a text\nof two lines", "plain")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no prompts"),
        ("{", "line 1: .*allowed: one JSON object per line"),
        ('{"prompt": "x"}\n{"turns": []}', 'line 2: no text; allowed: {"prompt": text}'),
        ('{"turns": [7]}', "line 1: no text"),
        ("[1]", "line 1: no text"),
        ("[" * 100_000, "line 1: .*allowed: one JSON object per line"),
    ],
)
def test_a_file_without_valid_prompts_is_refused_in_one_line(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    with pytest.raises(UsageError, match=message) as refusal:
        read_prompts(file)
    assert "\n" not in str(refusal.value) and str(file) in str(refusal.value)


def test_an_empty_text_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    with pytest.raises(UsageError, match="is empty; allowed: a text"):
        read_prompts(empty)
    with pytest.raises(UsageError, match="cannot be read"):
        read_prompts(tmp_path / "missing.txt")


def test_only_newlines_separate_the_lines_of_a_prompt_file(tmp_path: Path) -> None:
    """JSON may contain other characters that Python treats as ends of lines."""
    file = tmp_path / "lines.jsonl"
    file.write_text('{"prompt": "a\u2028b"}\r\n{"prompt": "c\x85d"}\n', newline="")
    assert [prompt.prompt for prompt in read_prompts(file)] == ["a\u2028b", "c\x85d"]
