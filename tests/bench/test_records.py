"""Records: one complete line per finished run; a benchmark is resumed only with the settings it began with."""

import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream import SamplingParams, UsageError
from slipstream.bench.arms import label, parse_arms, reference_of
from slipstream.bench.plan import groups, name_prompts, plan
from slipstream.bench.records import (
    FILE,
    Header,
    Run,
    append,
    compact,
    differences,
    finished,
    make_header,
    open_folder,
    read_records,
    start,
)
from slipstream.config import DecoderConfig
from slipstream.core.rounds import Round, Seconds
from slipstream.errors import SlipstreamError
from slipstream.text.prompt_sets import NamedPrompt
from slipstream.text.results import Stats
from tests.support.markers import subcases

HEADER = Header({"target": "toy"}, {"torch": "2"}, {"cores": 2}, "2026-01-01T00:00:00+00:00")


def run_of(repeat: int, **changes: object) -> Run:
    rounds = [compact(Round(0, 5, 1, 9, (1, 2), (7, 8), 1, True, None, Seconds(0.1, 0.2, 0.3, 0.4, 1.0)))]
    run = Run("none", ["a/1"], "a", 1, repeat, 0.5, 2, [[7, 8]], ["reference"], Stats(num_rounds=1).to_dict(), rounds)
    return replace(run, **changes)  # type: ignore[arg-type]


def test_appended_runs_are_read_back(tmp_path: Path) -> None:
    runs = [run_of(0), run_of(1, error="RuntimeError: broken", texts=[], verdicts=[])]
    start(tmp_path / "new" / "folder", HEADER)
    for run in runs:
        append(tmp_path / "new" / "folder", run)
    assert read_records(tmp_path / "new" / "folder") == (HEADER, runs)
    assert finished(runs) == {("none", ("a/1",), 1, 0), ("none", ("a/1",), 1, 1)}
    assert runs[0].tokens_per_second == 4.0 and runs[1].tokens_per_second is None


def test_a_line_holds_the_fields_that_readers_rely_on(tmp_path: Path) -> None:
    start(tmp_path, HEADER)
    append(tmp_path, run_of(0))
    header, run = map(json.loads, (tmp_path / FILE).read_text().splitlines())
    assert list(header) == ["kind", "settings", "versions", "machine", "started", "prompts", "command"]
    fields = (
        "kind arm prompts family batch repeat seconds num_output_tokens texts verdicts stats rounds num_forwards parts "
        "error"
    )
    assert list(run) == fields.split() and (header["kind"], run["kind"]) == ("header", "run")
    round = Round(0, 5, 1, 9, (1, 2), (1, 3), 1, True, None, Seconds(0.1, 0.2, 0.3, 0.4, 1.0))
    assert compact(round) == {
        **{"row": 0, "step": 5, "start": 9, "draft": [1, 2], "tokens": [1, 3], "accepted": 1, "rejected": True},
        "seconds": [0.1, 0.2, 0.3, 0.4, 1.0],
    }


def test_a_run_with_other_fields_is_refused(tmp_path: Path) -> None:
    start(tmp_path, HEADER)
    append(tmp_path, run_of(0))
    file = tmp_path / FILE
    file.write_text(file.read_text().replace(',"rounds":', ',"turns":'))
    with pytest.raises(UsageError, match="line 2: not a benchmark"):
        read_records(tmp_path)


@pytest.mark.parametrize(
    ("line", "before", "after", "message"),
    [
        (2, b'"arm":"none"', b'"arm":3', "arm is 3; allowed: str"),
        (2, b'"arm":"none"', b'"arm":"n\xffne"', "it is not valid UTF-8 at byte 22"),
        (2, b'"seconds":0.5', b'"seconds":NaN', "seconds is nan; allowed: float"),
        (2, b'"seconds":0.5', b'"seconds":0', "seconds=0 with .*; allowed: seconds above 0"),
        (2, b'"seconds":0.5', b'"seconds":-1', "seconds is -1; allowed: float"),
        (2, b'["reference"]', b'["right"]', r"verdicts is \['right'\]; allowed: list.*identical"),
        (2, b'["reference"]', b"[]", "'verdicts': 0}; allowed: seconds above 0, and as many of each"),
        (2, b"[[7,8]]", b"[[7]]", "num_output_tokens=2; allowed: the texts' length"),
        (2, b'"num_rounds":1', b'"num_rounds":[]', r"stats: num_rounds is \[\]; allowed: int"),
        (2, b'"num_steps":0,', b"", "stats: num_steps is nothing; allowed: int"),
        (2, b'"accepted":1', b'"accepted":1e999', r"rounds\[0\]: accepted is inf; allowed: int"),
        (1, b'"target":"toy"', b'"params":""', "settings: params is ''; allowed: dict"),
    ],
)
def test_a_line_edited_by_hand_is_refused_by_field_and_value(
    tmp_path: Path, line: int, before: bytes, after: bytes, message: str
) -> None:
    start(tmp_path, HEADER)
    append(tmp_path, run_of(0))
    file = tmp_path / FILE
    assert before in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(before, after, 1))
    with pytest.raises(UsageError, match=f"{FILE}', line {line}: .*{message}"):
        read_records(tmp_path)


@pytest.mark.parametrize("size", [1, 40, 200_000])
def test_a_torn_last_line_is_ignored_and_overwritten(tmp_path: Path, size: int) -> None:
    start(tmp_path, HEADER)
    append(tmp_path, run_of(0))
    with (tmp_path / FILE).open("a") as file:
        file.write('{"kind": "run", "arm": "' + "x" * size)
    assert read_records(tmp_path)[1] == [run_of(0)]
    append(tmp_path, run_of(1))
    assert read_records(tmp_path)[1] == [run_of(0), run_of(1)]


def test_a_full_disk_is_one_line_and_loses_no_finished_run(tmp_path: Path) -> None:
    start(tmp_path, HEADER)
    append(tmp_path, run_of(0))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / FILE).stat().st_size + 50, hard))
    try:
        with pytest.raises(SlipstreamError, match=r"runs\.jsonl' cannot be written: .*; finished runs") as full:
            append(tmp_path, run_of(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(full.value) and read_records(tmp_path)[1] == [run_of(0)]
    append(tmp_path, run_of(1))
    assert read_records(tmp_path)[1] == [run_of(0), run_of(1)]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be made: file exists"):
        start(tmp_path / "file", HEADER)
    (tmp_path / "folder" / FILE).mkdir(parents=True)
    with pytest.raises(SlipstreamError, match=r"cannot be (read|written): is a directory"):
        start(tmp_path / "folder", HEADER)


def test_a_header_without_runs_is_replaced(tmp_path: Path) -> None:
    start(tmp_path, HEADER)
    other = replace(HEADER, settings={"target": "toy:2"})
    assert open_folder(tmp_path, other) == [] and read_records(tmp_path) == (other, [])
    append(tmp_path, run_of(0))
    with pytest.raises(UsageError, match="already holds runs"):
        start(tmp_path, HEADER)


def test_a_folder_with_a_torn_header_starts_over(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"kind": "head')
    assert open_folder(tmp_path, HEADER) == []
    assert read_records(tmp_path) == (HEADER, [])


@pytest.mark.parametrize("line", ['{"kind": "walk"}', "no json", "[]", '{"kind": "run", "arm": "none"}'])
def test_a_line_that_is_not_a_run_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    start(tmp_path, HEADER)
    with (tmp_path / FILE).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UsageError, match="line 2"):
        read_records(tmp_path)


def test_a_folder_is_resumed_only_with_its_own_settings(tmp_path: Path) -> None:
    prompts = name_prompts([NamedPrompt("one", "x"), NamedPrompt("two", "x")])
    models, arms = {"target": "toy", "draft": None}, parse_arms("none,ngram")
    common = (DecoderConfig(), SamplingParams())
    header = make_header(models, arms, prompts, *common, repeats=3)
    assert open_folder(tmp_path, header) == []
    append(tmp_path, run_of(0))
    assert open_folder(tmp_path, make_header(models, arms, prompts, *common, repeats=3)) == [run_of(0)]
    other_text = name_prompts([NamedPrompt("one", "x"), NamedPrompt("three", "x")])
    for changed, named in (
        (make_header(models | {"target": "toy:3"}, arms, prompts, *common, repeats=3), "target='toy', now 'toy:3'"),
        (make_header(models, arms[:1], prompts, *common, repeats=3), "arms="),
        (make_header(models, arms, prompts, *common, repeats=5), "repeats=3, now 5"),
        (make_header(models, arms, other_text, *common, repeats=3), "prompts.x/2="),
        (make_header(models, arms, prompts, DecoderConfig(fast=False), SamplingParams(), repeats=3), "config.fast="),
        (make_header(models, arms, prompts, DecoderConfig(), SamplingParams(top_k=5), repeats=3), "params.top_k=0"),
        (replace(header, versions=header.versions | {"torch": "0.1"}), "torch="),
        (replace(header, machine=header.machine | {"cores": 64}), "cores="),
    ):
        with pytest.raises(UsageError, match="was begun with") as refused:
            open_folder(tmp_path, changed)
        assert str(refused.value).endswith(f"; to start over: rm -r {tmp_path}")
        assert named in str(refused.value) and "\n" not in str(refused.value)
    assert read_records(tmp_path)[1] == [run_of(0)]


def test_settings_are_compared_as_json() -> None:
    assert list(differences({"stop": ("a",), "bias": {3: 1.0}}, {"stop": ["a"], "bias": {"3": 1.0}})) == []
    assert list(differences({"a": {"b": 1}}, {"a": {"b": 2}, "c": 3})) == [("a.b", 1, 2), ("c", None, 3)]


def test_arms_are_parsed_from_their_names() -> None:
    texts = "none, ngram, ngram:2-4@7, ngram_table:fill, model@4/topk:10, none.plain, model@4/block.plain~0.8"
    texts += ", hf-lookup@5~1"
    arms = parse_arms(texts)
    assert [(a.drafter, a.num_draft_tokens, a.acceptance, a.fast, a.temperature, a.baseline) for a in arms] == [
        ("none", None, None, None, None, None),
        ("ngram", None, None, None, None, None),
        ("ngram:2-4", 7, None, None, None, None),
        ("ngram_table:fill", None, None, None, None, None),
        ("model", 4, "topk:10", None, None, None),
        ("none", None, None, False, None, None),
        ("model", 4, "block", False, 0.8, None),
        (None, 5, None, None, 1.0, "hf-lookup"),
    ]
    assert [a.name for a in arms] == [t.strip() for t in texts.split(",")]
    assert reference_of(arms, None) == "none" and reference_of(arms[1:], None) == "ngram"
    assert reference_of(arms, "ngram_table:fill") == "ngram_table:fill"


WRONG_ARMS = {
    "": "at least one",
    "none,none": "given twice",
    "magic": "drafter='magic'",
    "model@4x1": "num_draft_tokens='4x1'; allowed:",
    "model@33x2": "draft length 33x2",
    "hf-lookup@chain": "allowed: hf",
    "model@0": "draft length 0",
    "model@65": "draft length 65",
    "model@x": "arm 'model@x'",
    "model/magic": "acceptance='magic'",
    "none@4": "`none` drafts nothing",
    "none/match": "`none` drafts nothing",
    "hf@4": "arm 'hf@4'",
    "hf/match": "arm 'hf/match'",
    "hf.plain": "arm 'hf.plain'",
    "model~1e9": "arm 'model~1e9'",
}


@subcases("text", WRONG_ARMS)
def test_invalid_arms_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=WRONG_ARMS[text]):
        parse_arms(text)


def test_a_reference_must_be_an_arm() -> None:
    with pytest.raises(UsageError, match="reference 'hf' is not among the arms; allowed: none, ngram"):
        reference_of(parse_arms("none,ngram"), "hf")


PROMPTS = name_prompts([NamedPrompt(str(i), family) for i, family in enumerate("aaaabbbbbc")])


@subcases("batch", range(1, 11))
def test_groups_are_full_and_cover_every_prompt(batch: int) -> None:
    made = groups(PROMPTS, batch)
    assert all(len(set(group.ids)) == batch for group in made)
    assert {prompt.id for group in made for prompt in group.prompts} == {prompt.id for prompt in PROMPTS}
    assert len({tuple(group.ids) for group in made}) == len(made)


def test_groups_keep_to_one_family_if_they_can() -> None:
    assert [(group.family, group.ids) for group in groups(PROMPTS, 4)] == [
        ("a", ["a/1", "a/2", "a/3", "a/4"]),
        ("b", ["b/1", "b/2", "b/3", "b/4"]),
        ("mixed", ["b/5", "c/1", "a/1", "a/2"]),
    ]


def test_arms_take_turns_before_the_next_repeat() -> None:
    arms = parse_arms("none,hf-lookup,ngram")
    order = [
        (measurement.batch, measurement.group.ids[0], measurement.repeat, measurement.arm.name)
        for measurement in plan(arms, PROMPTS[:2], [1, 2], 2)
    ]
    # transformers' own works for a single prompt only
    alone, together = (("none", "hf-lookup", "ngram"), ("none", "ngram"))
    assert order == [
        *((1, prompt, repeat, arm) for prompt in ("a/1", "a/2") for repeat in (0, 1) for arm in alone),
        *((2, "a/1", repeat, arm) for repeat in (0, 1) for arm in together),
    ]


def test_a_call_may_have_more_prompts_than_its_batch_size() -> None:
    planned = plan(parse_arms("none,hf"), PROMPTS, [2], 1, at_once=5)
    assert [(measurement.batch, len(measurement.group.ids)) for measurement in planned] == [(2, 5)] * 4
    for at_once, message in ((1, "--at-once 1; allowed: at least the batch size, 2"), (11, "--at-once 11; allowed: 1")):
        with pytest.raises(UsageError, match=message):
            plan(parse_arms("none"), PROMPTS, [2], 1, at_once=at_once)


def test_an_invalid_plan_is_refused() -> None:
    arms = parse_arms("none,hf-assisted")
    for batches, repeats, message in (
        ([11], 1, "batch size 11; allowed: 1 to 10"),
        ([2], 1, "'hf-assisted' decodes one prompt at a time"),
        ([1], 0, "repeats=0"),
        ([1, 1], 1, "batch sizes 1, 1"),
    ):
        with pytest.raises(UsageError, match=message):
            plan(arms, PROMPTS, batches, repeats)


def test_an_arm_may_have_a_tree_or_chain_as_its_length() -> None:
    tree, chain = parse_arms("model@4x2/match~0.8,auto@chain")
    assert (tree.num_draft_tokens, chain.num_draft_tokens) == ("4x2", "chain")
    assert label(tree.name) == "model, tree 4x2, match rule, temperature 0.8" and label(chain.name) == "auto, no trees"
