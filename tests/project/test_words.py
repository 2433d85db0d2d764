"""The field's words: no private name is left in sources, documentation, examples, benchmarks and tests."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KINDS = {".py", ".md", ".c", ".h", ".ipynb", ".toml"}
AREAS = ("src", "docs", "examples", "benchmarks", "tests", "packaging", "README.md", "Makefile", "pyproject.toml")
FILES = sorted(
    path
    for area in AREAS
    for path in [ROOT / area, *(ROOT / area).rglob("*")]
    if path.is_file() and (path.suffix in KINDS or path.name == "Makefile") and ".egg-info" not in str(path)
    if path != Path(__file__)  # has them all
)

# a private word, and the field's; kept, held, view, turn, rest and memory are ordinary English too and not listed
REPLACED = {
    "law": "distribution",
    "laws": "distributions",
    "dice": "random draws",
    "hopes": "acceptance probabilities",
    "odds": "acceptance model",
    "pace": "cost model",
    "prospect": "draft yield",
    "prospects": "draft yields",
    "memo": "KV cache",
    "memos": "KV caches",
    "ledger": "cache audit",
    "contest": "search",
    "lean": "fused",
    "twin": "layer subset",
    "shallow": "layer subset",
    "aimed": "graph memory",
    "frugal": "attended lengths",
    "unrolled": "greedy rounds",
    "peer": "baseline",
    "peers": "baselines",
    "drawn": "sampled",
    "lookup": "retrieval draft",
    "lookups": "retrieval drafts",
    "recycle": "token_recycling",
}
PHRASES = {
    r"look-ups?\b": "retrieval draft",
    r"\blook(s|ed|ing)? up\b": "retrieval draft, or search",
    r"`(exit|table)\b": "layer_skip, ngram_table",
    r"\b(exit|table):(fill|\d)": "layer_skip, ngram_table",
    r"\bbackends/|slipstream\.(reference|drop_in|backends|prompts|engine|cli)\b": "the packages of today",
    r"\bwhat (a|an|the) \w+ is besides\b": "optional capability",
    r"whole[- ]views?\b": "attended length",
}
# what has its ordinary meaning, or is a name of somebody else's
ORDINARY = r"""
    prompt[ _-]lookup | hf[-_]lookup | llama[-_]lookup | PromptLookupDecoding
  | lookup[-_]decoding | assistant_lookup | with_lookup | lookup\ table
  | \bLOOKUP\b | LookupError | "lean\ " | log[-_]odds | memo:\ dict | _slipstream_held
  | drawn\ (dashed|across|chart|with) | how\ it\ is\ drawn | _drawn\(chart | (charts?|plots?)\ drawn
"""
FINE = re.compile(ORDINARY, re.VERBOSE | re.IGNORECASE)


def words(text: str) -> list[str]:
    """The words of a text in lower case; identifiers are split at underscores and at capitals."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text)]


def leftovers(text: str, ordinary: Sequence[str] = ()) -> list[str]:
    """A line for each private word of a text that is not `ordinary` there, with the word that replaced it."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        said = FINE.sub(" ", line)
        there = [word for word in words(said) if word in REPLACED and word not in ordinary]
        found += [f"{number}: {word} -> {REPLACED[word]}: {line.strip()[:100]}" for word in there]
        found += [f"{number}: {new}: {line.strip()[:100]}" for old, new in PHRASES.items() if re.search(old, said)]
    return found


@pytest.mark.parametrize("area", AREAS)
def test_no_private_word_is_left(area: str) -> None:
    of_area = [path for path in FILES if path == ROOT / area or ROOT / area in path.parents]
    assert of_area
    ordinary = ("drawn",) if area == "tests" else ()  # charts are, and tokens from wrong distributions
    found = [f"{path.relative_to(ROOT)}:{line}" for path in of_area for line in leftovers(path.read_text(), ordinary)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "the law of p",
        "_sum_of_odds",
        "class TwinBackend:",
        "memoOfRow",
        "a look-up is cut",
        "`table:fill`",
        "backends/lean.py",
    ],
)
def test_a_private_word_is_found_wherever_it_stands(text: str) -> None:
    assert leftovers(f"fine\n{text}\n")[0].startswith("2: ")


@pytest.mark.parametrize(
    "text", ["a flawless clean memory, opened spaces", "hf-lookup@7", "prompt_lookup_num_tokens", "a table of 3 rows"]
)
def test_other_words_are_left_alone(text: str) -> None:
    assert not leftovers(text)


NAMED = re.compile(
    r"`((?:\w+/)*\w+\.(?:py|c|h|json|jsonl))`|\b((?:benchmarks|examples|tests)/[\w/]+\.(?:py|json|jsonl))"
)
MADE = {"runs.jsonl", "predictions.json", "slipstream.json", "tune.json", "vllm.json"}  # by commands


@pytest.mark.parametrize("page", sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]), ids=lambda p: p.stem)
def test_files_that_a_page_names_exist(page: Path) -> None:
    here = [str(path.relative_to(ROOT)) for area in AREAS[:6] for path in (ROOT / area).rglob("*")]
    named = {one or two for one, two in NAMED.findall(page.read_text())} - MADE
    assert [name for name in sorted(named) if not any(f"/{path}".endswith(f"/{name}") for path in here)] == []
