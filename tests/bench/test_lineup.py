"""Runs: arms take turns, each run starts with an empty KV cache, and texts are compared with plain decoding."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream import Draft, SamplingParams, SpeculativeDecoder, UsageError, drafters
from slipstream.bench.arms import Arm, parse_arms
from slipstream.bench.lineup import Lineup, Runner
from slipstream.bench.plan import plan
from slipstream.bench.records import Run, read_records, start
from slipstream.bench.summary import summarize, wrong_texts
from slipstream.core.acceptance import Rule, block
from slipstream.models.toy import load_toy
from tests.support.toy_bench import GREEDY, HEADER, PROMPTS, toy
from tests.support.vocabularies import decoder_of, fable_model
from tests.support.wrong_acceptance_rules import load_wrong_rule


def measured(
    folder: Path,
    decoder: SpeculativeDecoder,
    arms: str,
    params: SamplingParams = GREEDY,
    batches: Sequence[int] = (1,),
    repeats: int = 1,
) -> list[Run]:
    """The runs of these arms on PROMPTS, read back from the folder."""
    runner = runner_of(folder, decoder, arms, params, batches, repeats)
    runs = list(runner.run([]))
    assert read_records(folder)[1] == runs
    return runs


def runner_of(
    folder: Path, decoder: SpeculativeDecoder, arms: str, params: SamplingParams, batches: Sequence[int], repeats: int
) -> Runner:
    chosen = parse_arms(arms)
    start(folder, HEADER)
    return Runner(Lineup(decoder, chosen, params), plan(chosen, PROMPTS, batches, repeats), folder)


def verdicts(runs: Sequence[Run], arm: str) -> list[str]:
    return [verdict for run in runs if run.arm == arm for verdict in run.verdicts]


class Spy(Lineup):
    """Records its calls, and fails for the prompts it was given to fail for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.events: list[tuple[str, str, int]] = []
        self.broken: dict[str, Exception] = {}

    def forget(self, arm: Arm) -> None:
        self.events.append(("forget", arm.name, 0))
        super().forget(arm)

    def generate(self, arm: Arm, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Any:
        self.events.append(("generate", arm.name, params[0].max_tokens))
        if arm.name in self.broken:
            raise self.broken[arm.name]
        return super().generate(arm, prompts, params)


def spied(folder: Path, arms: str, repeats: int = 2) -> tuple[Spy, Runner]:
    start(folder, HEADER)
    chosen = parse_arms(arms)
    spy = Spy(toy(), chosen, GREEDY)
    return spy, Runner(spy, plan(chosen, PROMPTS[:2], [1], repeats), folder)


def test_runs_take_turns_after_a_warm_up_and_each_starts_from_an_empty_cache(tmp_path: Path) -> None:
    spy, runner = spied(tmp_path, "none,ngram")
    runs = list(runner.run([]))
    names, ids = ("none", "ngram"), ("birds/1", "fish/1")
    order = [(prompt, repeat, arm) for prompt in ids for repeat in (0, 1) for arm in names]
    assert [(run.prompts[0], run.repeat, run.arm) for run in runs] == order
    first = [(kind, arm, n) for arm in names for kind, n in (("generate", 8), ("forget", 0), ("generate", 24))]
    later = [(kind, arm, n) for _, _, arm in order[2:] for kind, n in (("forget", 0), ("generate", 24))]
    assert spy.events == [*first, *later]


def test_a_run_does_not_use_the_cache_of_an_earlier_one(tmp_path: Path) -> None:
    runs = measured(tmp_path, toy(), "none,ngram", repeats=2)
    decoder = toy()
    fed = []
    for run in runs[:2]:
        decoder.forget()
        before = decoder._target_session.prefill_tokens
        decoder.using(run.arm).generate(PROMPTS[0].text, GREEDY)
        fed.append(decoder._target_session.prefill_tokens - before)
    assert fed[0] == fed[1] > 0


def test_a_failed_arm_is_an_error_line_and_the_others_continue(tmp_path: Path) -> None:
    spy, runner = spied(tmp_path, "none,ngram", repeats=1)
    spy.broken["ngram"] = RuntimeError("out of memory\nin a long trace")
    runs = list(runner.run([]))
    assert [run.error for run in runs] == [None, "RuntimeError: out of memory"] * 2
    failed = runs[1]
    assert (failed.seconds, failed.texts, failed.stats, failed.tokens_per_second) == (0.0, [], None, None)
    none, ngram = summarize(read_records(tmp_path)[1], "none")
    assert none.speed is not None and ngram.speed is None and ngram.failed == 2


@pytest.mark.slow
def test_texts_of_lossless_arms_are_identical_alone_and_in_a_batch(tmp_path: Path) -> None:
    arms = "none,ngram@3,ngram_table,model@4,none.plain"
    runs = measured(tmp_path, toy(), arms, batches=(1, 2, 3), repeats=2)
    assert verdicts(runs, "none")[:2] == ["reference", "identical"]
    compared = [v for arm in arms.split(",") for v in verdicts([r for r in runs if r.repeat or r.batch > 1], arm)]
    assert set(compared) == {"identical"} and not wrong_texts(summarize(runs, "none"))
    assert all(run.num_output_tokens == 24 * run.batch == sum(map(len, run.texts)) for run in runs)
    assert all(run.stats["num_output_tokens"] == run.num_output_tokens for run in runs if run.stats)


@pytest.mark.parametrize("arms,batch", [("ngram,model@4", 1), ("none,ngram", 3)])
def test_a_reference_is_decoded_if_no_plain_arm_of_batch_size_1_does(tmp_path: Path, arms: str, batch: int) -> None:
    runs = measured(tmp_path, toy(), arms, batches=[batch])
    assert {run.arm for run in runs} == set(arms.split(","))
    assert {v for run in runs for v in run.verdicts} == {"identical"}


@pytest.mark.parametrize("sampled", [False, True])
def test_a_wrong_rule_is_caught_in_greedy_texts(tmp_path: Path, sampled: bool) -> None:
    params = replace(GREEDY, temperature=0.9 if sampled else 0.0, seed=1)
    decoder = toy().using(acceptance=load_wrong_rule("first-mismatch-kept"))
    runs = measured(tmp_path, decoder, "model@4", params)
    # under sampling, a rule that does not couple draws promises a distribution, not a text
    assert ("different" in verdicts(runs, "model@4")) is not sampled
    assert bool(wrong_texts(summarize(runs, "model@4"))) is not sampled


def test_sampled_texts_are_compared_only_under_the_match_rule(tmp_path: Path) -> None:
    arms = "none,ngram,model@4,model@4/block,model@4/rejection,ngram/rejection,none~0.5"
    runs = measured(tmp_path, toy(), arms, replace(GREEDY, temperature=0.9, seed=3))
    verdicts_of = {arm: set(verdicts(runs, arm)) for arm in arms.split(",")}
    assert verdicts_of["none"] == verdicts_of["none~0.5"] == {"reference"}
    assert verdicts_of["ngram"] == verdicts_of["model@4"] == {"identical"}
    assert (
        verdicts_of["model@4/block"]
        == verdicts_of["model@4/rejection"]
        == verdicts_of["ngram/rejection"]
        == {"not compared"}
    )
    texts = {arm: [run.texts for run in runs if run.arm == arm] for arm in ("none", "none~0.5")}
    assert texts["none"] != texts["none~0.5"] and len({str(text) for text in texts["none"]}) == len(PROMPTS)


@pytest.mark.parametrize("name", [name for name in drafters.names() if name != "none"])
def test_only_drafters_that_declare_sampling_have_draft_probabilities(name: str) -> None:
    """Under rules other than `match`: such drafts are then accepted as one-hot."""
    options: dict[str, Any] = {"drafter": name, "num_draft_tokens": 3}
    bridged = drafters.traits(name).other_vocabulary
    decoder = decoder_of(load_toy("toy"), fable_model("bytes"), **options) if bridged else toy(**options)
    seen = list[bool]()

    def watched(p: Any, scores: Any, draft: Draft) -> Any:
        seen.append(draft.probs is not None)
        return block(p, scores, draft)

    prompts = [[0, 1, 2, 3] * 4, [0]]
    params = SamplingParams(temperature=1.0, max_tokens=8, seed=0, ignore_eos=True)
    decoder.using(acceptance=Rule("block", lossless=True, distributions=watched)).generate(prompts, params)
    assert seen and any(seen) == decoder.traits.samples


def test_a_planted_difference_under_sampling_is_caught(tmp_path: Path) -> None:
    class Forger(Lineup):
        def generate(self, arm: Arm, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Any:
            output = super().generate(arm, prompts, params)
            if arm.name == "ngram":
                output.texts[0][-1] ^= 1
            return output

    start(tmp_path, HEADER)
    arms = parse_arms("none,ngram")
    lineup = Forger(toy(), arms, replace(GREEDY, temperature=0.9, seed=3))
    runs = list(Runner(lineup, plan(arms, PROMPTS, [1], 1), tmp_path).run([]))
    assert verdicts(runs, "ngram") == ["different"] * 3


def test_a_finished_run_is_not_repeated(tmp_path: Path) -> None:
    spy, runner = spied(tmp_path, "none,ngram")
    whole = []
    for run in runner.run([]):
        whole.append(run)
        if len(whole) == 3:
            break
    again = Spy(toy(), spy.arms, GREEDY)
    runner = Runner(again, runner.plan, tmp_path)
    resumed = list(runner.run(read_records(tmp_path)[1]))
    assert [run.key for run in (*whole, *resumed)] == [measurement.key for measurement in runner.plan]
    assert read_records(tmp_path)[1] == [*whole, *resumed]
    # the reference text comes from the first process, and the other runs are compared with it
    assert [run.verdicts for run in (*whole, *resumed)].count(["reference"]) == 2
    assert len([event for event in again.events if event[2] == 24]) == len(runner.plan) - 3


@pytest.mark.parametrize(
    "arms,params,message",
    [
        ("hf", GREEDY, "arm 'hf' needs a Hugging Face model; target 'toy' is not one"),
        ("hf-lookup", replace(GREEDY, presence_penalty=1.0), "arm 'hf-lookup' with presence_penalty=1.0"),
    ],
)
def test_impossible_arms_are_refused_before_anything_runs(arms: str, params: SamplingParams, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Lineup(toy(), parse_arms(arms), params)
    with pytest.raises(UsageError, match="needs a draft model"):
        Lineup(SpeculativeDecoder("toy"), parse_arms("none,model"), GREEDY)


def test_a_run_with_a_failed_arm_resumes_where_it_stopped(tmp_path: Path) -> None:
    spy, runner = spied(tmp_path, "none,ngram")
    spy.broken["ngram"] = RuntimeError("out of memory")
    running = runner.run([])
    first = [next(running), next(running)]
    assert [run.error is None for run in first] == [True, False]
    again = Runner(Spy(toy(), spy.arms, GREEDY), runner.plan, tmp_path)
    resumed = list(again.run(read_records(tmp_path)[1]))
    assert [run.key for run in (*first, *resumed)] == [measurement.key for measurement in runner.plan]
    assert all(run.error is None for run in resumed)
