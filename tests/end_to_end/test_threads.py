"""With threads, interleaved streams, forks, closing and pickling, texts are right or an error says what is wrong."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.core.types import Row
from slipstream.models.cpu import thread_placement
from tests.support.markers import subcases
from tests.support.processes import PATIENCE
from tests.support.tiny_models import fresh, perturbed, prompts, shared

TEXTS = ["A heron and", "The sparrow was", "So the heron ate", "Then the wind", "It looked at", "You are fast"]
THREADS = 6


def together(work: list[Callable[[], Any]]) -> list[Any]:
    """The results of functions that are started at once, each in a thread of its own."""
    results: list[Any] = [None] * len(work)
    begin = threading.Barrier(len(work))

    def run(i: int) -> None:
        begin.wait()
        try:
            results[i] = work[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "threads wait for each other"
    return results


def streamed(decoder: SpeculativeDecoder, prompt: Any, params: SamplingParams) -> list[int]:
    return [token for chunk in decoder.stream(prompt, params) for token in chunk.token_ids]


def check_threads(decoder: SpeculativeDecoder, texts: list[Any], params: list[SamplingParams]) -> None:
    """Half of the threads stream and half generate, from decoders with different settings over the same models."""
    alone = [decoder.generate(text, options).token_ids for text, options in zip(texts, params, strict=True)]
    decoder.forget()
    variants = [decoder, decoder.using("none"), decoder.using("ngram", num_draft_tokens=3)]

    def work(i: int) -> Callable[[], list[int]]:
        thread_decoder = variants[i % len(variants)]
        if i % 2:
            return lambda: streamed(thread_decoder, texts[i], params[i])
        return lambda: thread_decoder.generate(texts[i], params[i]).token_ids

    assert together([work(i) for i in range(THREADS)]) == alone


@pytest.mark.slow
def test_threads_get_the_text_that_each_gets_alone() -> None:
    params = [SamplingParams(max_tokens=60), SamplingParams(max_tokens=60, temperature=0.9, seed=3)] * 3
    decoder = SpeculativeDecoder("toy", "toy:2", acceptance="match")
    for _ in range(3):
        check_threads(decoder, TEXTS, params)


@pytest.mark.slow
def test_decoders_over_one_loaded_model_take_turns() -> None:
    model, params = fresh("llama"), SamplingParams(max_tokens=20)
    decoders = [SpeculativeDecoder(model, perturbed("llama") if i % 2 else None) for i in range(THREADS)]
    texts = prompts([5, 9, 14, 6, 8, 21])
    alone = [decoders[0].using("none").generate(text, params).token_ids for text in texts]
    work = [
        lambda decoder=decoder, text=text: decoder.generate(text, params).token_ids
        for decoder, text in zip(decoders, texts, strict=True)
    ]
    assert together(work) == alone


def test_no_two_threads_are_inside_a_model_at_once() -> None:
    decoder = SpeculativeDecoder("toy", drafter="none")
    backend: Any = decoder.target.backend
    forward, inside, highest = backend.forward, [0], [0]

    def counted(*arguments: Any, **options: Any) -> Any:
        inside[0] += 1
        highest[0] = max(highest[0], inside[0])
        threading.Event().wait(0.001)  # gives other threads a chance to enter
        inside[0] -= 1
        return forward(*arguments, **options)

    backend.forward = counted
    params = SamplingParams(max_tokens=10)
    together([lambda text=text: streamed(decoder, text, params) for text in TEXTS])
    assert highest == [1]


def test_threads_add_cancel_and_step_one_scheduler_while_others_generate() -> None:
    params = SamplingParams(max_tokens=40)
    decoder = SpeculativeDecoder("toy", drafter="ngram", num_draft_tokens=3)
    alone = [decoder.generate(text, params).token_ids for text in TEXTS]
    made, rows = decoder.scheduler(), decoder.rows(TEXTS, params)

    def submit(row: Row) -> None:
        made.add(row)
        if row is rows[1]:
            made.cancel(row)

    def step() -> None:
        while any(row.finish_reason is None for row in rows):
            made.step()

    work: list[Callable[[], Any]] = [lambda row=row: submit(row) for row in rows]  # type: ignore[misc]
    others = [lambda: decoder.using("none").generate(TEXTS[0], params).token_ids] * 2
    assert together([*work, step, step, *others])[-2:] == [alone[0]] * 2
    assert [row.output for row in rows[:1] + rows[2:]] == alone[:1] + alone[2:]
    assert rows[1].output == alone[1][: len(rows[1].output)]


def test_a_step_of_a_scheduler_waits_for_its_turn() -> None:
    decoder = SpeculativeDecoder("toy", drafter="none")
    made = decoder.scheduler()
    made.add(decoder.rows(TEXTS[:1], SamplingParams(max_tokens=3))[0])
    stepped = threading.Event()

    def step() -> None:
        made.step()
        stepped.set()

    with decoder._use:
        thread = threading.Thread(target=step, daemon=True)
        thread.start()
        assert not stepped.wait(0.2)
    assert stepped.wait(PATIENCE)
    thread.join()


def test_streams_interleave_in_one_thread() -> None:
    decoder, params = SpeculativeDecoder("toy"), SamplingParams(max_tokens=40)
    alone = [decoder.generate(text, params).token_ids for text in TEXTS[:3]]
    streams = [decoder.stream(text, params) for text in TEXTS[:3]]
    texts: list[list[int]] = [[], [], []]
    under_way = set(range(3))
    while under_way:
        for i in sorted(under_way):
            chunk = next(streams[i], None)
            if chunk is None:
                under_way.remove(i)
            else:
                texts[i] += chunk.token_ids
                decoder.generate(TEXTS[4], SamplingParams(max_tokens=2))  # and another call in between
    assert texts == alone


def test_a_paused_stream_does_not_block_other_calls() -> None:
    decoder, params = SpeculativeDecoder("toy"), SamplingParams(max_tokens=40)
    paused = decoder.stream(TEXTS[0], params)
    next(paused)
    assert together([lambda: decoder.generate(TEXTS[1], params).text])[0] == decoder.generate(TEXTS[1], params).text


@pytest.mark.parametrize("inner", ["same", "derived", "scheduler"])
def test_a_logits_processor_that_decodes_with_its_own_models_is_refused(inner: str) -> None:
    decoder = SpeculativeDecoder("toy")
    text = decoder.generate(TEXTS[0], max_tokens=6, ignore_eos=True).token_ids

    def decode() -> None:
        if inner == "scheduler":
            decoder.scheduler().step()
        else:
            (decoder if inner == "same" else decoder.using("none")).generate("x", max_tokens=2)

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == len(prompt) + 3:
            decode()
        return scores

    prompt = decoder.encode(TEXTS[0])
    with pytest.raises(UsageError, match="in the middle of a step; allowed: a decoder over other models"):
        decoder.generate(prompt, max_tokens=6, ignore_eos=True, logits_processors=[processor])
    assert decoder.generate(TEXTS[0], max_tokens=6, ignore_eos=True).token_ids == text


def test_a_logits_processor_may_decode_with_other_models_and_cancel_its_row() -> None:
    decoder, other = SpeculativeDecoder("toy"), SpeculativeDecoder(shared("llama"))
    scheduler = decoder.scheduler()

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert len(other.generate([5, 6], max_tokens=2, ignore_eos=True).token_ids) == 2
        scheduler.cancel(row)
        return scores

    row = decoder.rows(["A heron"], SamplingParams(max_tokens=50, ignore_eos=True, logits_processors=[processor]))[0]
    scheduler.add(row)
    while scheduler.unfinished:
        scheduler.step()
    assert row.finish_reason == "cancelled"
    assert len(decoder.result(row).token_ids) < 50


def test_interleaved_decoders_keep_their_own_attended_lengths() -> None:
    exact = SpeculativeDecoder(shared("llama"), drafter="none", reproducible=True)
    unpadded = exact.using(reproducible=False)
    backend: Any = exact.target.backend
    wanted = {id(decoder): decoder._target_session.shapes.attended_lengths for decoder in (exact, unpadded)}
    assert wanted[id(exact)] != wanted[id(unpadded)]
    params, text = SamplingParams(max_tokens=6), prompts([6])[0]
    streams = [(decoder, decoder.stream(text, params)) for decoder in (exact, unpadded)]
    for _ in range(3):
        for decoder, stream in streams:
            next(stream)
            assert backend.attended_lengths == wanted[id(decoder)]


def in_forked_process(work: Callable[[], str]) -> str:
    """The result of `work` in a forked process."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        threading.Timer(PATIENCE, os._exit, [1]).start()
        try:
            output = work()
        except BaseException as error:
            output = f"{type(error).__name__}: {error}"
        os.write(writable, output.encode())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as file:
        output = file.read()
    os.waitpid(child, 0)
    return output


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_decoder_from_before_a_fork_is_refused_in_one_line() -> None:
    decoder = SpeculativeDecoder(shared("llama"))
    text, params = prompts([6])[0], SamplingParams(max_tokens=4)
    before = decoder.generate(text, params).token_ids
    paused = decoder.stream(text, params)
    next(paused)
    for use in (lambda: decoder.generate(text, params).text, lambda: next(paused).text):
        output = in_forked_process(use)
        assert output.startswith(f"UsageError: this decoder was made in process {os.getpid()} and this is process ")
        assert "allowed: " in output and "\n" not in output
    assert decoder.generate(text, params).token_ids == before


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_decoder_made_in_a_fork_works_even_if_the_lock_was_taken_before() -> None:
    model, params = shared("llama"), SamplingParams(max_tokens=4)
    decoder, text = SpeculativeDecoder(model), prompts([6])[0]
    expected = str(decoder.generate(text, params).token_ids)
    taken, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with decoder._use:
            taken.set()
            leave.wait(PATIENCE)

    holder = threading.Thread(target=hold)
    holder.start()
    assert taken.wait(PATIENCE)
    output = in_forked_process(lambda: str(SpeculativeDecoder(model).generate(text, params).token_ids))
    leave.set()
    holder.join()
    assert output == expected


FORKS = """
import multiprocessing
import torch
from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.models import exclusive_use

exclusive_use.TRIAL_SECONDS = 60.0  # a trial that ends may take its time on a busy machine
torch.set_num_threads(2)


def text(threads):
    torch.set_num_threads(threads)
    try:
        print(repr(SpeculativeDecoder("toy").generate("A heron", SamplingParams(max_tokens=4)).text), flush=True)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)


def in_a_fork(work, *inputs):
    child = multiprocessing.get_context("fork").Process(target=work, args=inputs)
    child.start()
    child.join()


in_a_fork(text, 2)  # nothing has been computed before
torch.ones(1 << 22).sum()
exclusive_use.TRIAL_SECONDS = 1.0  # it hangs forever
in_a_fork(text, 2)
in_a_fork(text, 1)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems' OpenMP, or no forks")
def test_a_fork_in_which_threads_would_hang_is_refused_in_one_line() -> None:
    # threads that are bound to cores do not hang in a fork
    environment = {name: value for name, value in os.environ.items() if name not in thread_placement.CHOSEN}
    environment["OMP_NUM_THREADS"] = "2"
    ran = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, env=environment, timeout=PATIENCE
    )
    unused, used, single = ran.stdout.splitlines()
    assert unused == single == repr(" and")
    assert used.startswith("UsageError: process ") and "PyTorch would wait for them forever" in used
    assert "allowed: processes started by multiprocessing's method 'spawn'" in used and "after the fork" not in used


USES: dict[str, Callable[[SpeculativeDecoder], Any]] = {
    "generate": lambda decoder: decoder.generate("a"),
    "stream": lambda decoder: next(decoder.stream("a")),
    "rounds": lambda decoder: next(decoder.rounds(["a"])),
    "run": lambda decoder: next(decoder.run([Row(0, [1], SamplingParams(), 0)])),
    "encode": lambda decoder: decoder.encode("a"),
    "using": lambda decoder: decoder.using("none"),
    "with_draft": lambda decoder: decoder.with_draft(None),
    "forget": lambda decoder: decoder.forget(),
    "scheduler": lambda decoder: decoder.scheduler(),
    "next_logits": lambda decoder: decoder.next_logits([1]),
    "tokenizer": lambda decoder: decoder.tokenizer,
    "with": lambda decoder: decoder.__enter__(),
}


@subcases("use", USES)
def test_a_closed_decoder_refuses_in_one_line(use: str) -> None:
    decoder = SpeculativeDecoder("toy")
    with decoder as same:
        assert same is decoder and same.generate("a", SamplingParams(max_tokens=3)).token_ids
    with pytest.raises(UsageError, match=r"^this decoder is closed; allowed: "):
        USES[use](decoder)
    decoder.close()
    assert repr(decoder) == "SpeculativeDecoder(closed)" and decoder.drafter_name == "suffix"


def test_closing_frees_models_but_leaves_derived_decoders_open() -> None:
    import weakref

    model = fresh("llama")
    decoder = SpeculativeDecoder(model, drafter="none")
    other, text, params = decoder.using("ngram"), prompts([6])[0], SamplingParams(max_tokens=4)
    expected = decoder.generate(text, params).token_ids
    paused = decoder.stream(text, params)
    next(paused)
    decoder.close()
    with pytest.raises(UsageError, match="closed"):
        next(paused)
    del paused
    assert other.generate(text, params).token_ids == expected
    backend, weights = weakref.ref(other.target.backend), weakref.ref(model)
    other.close()
    del model
    import gc

    gc.collect()
    assert backend() is None and weights() is None


def test_repr_says_what_the_decoder_is() -> None:
    decoder = SpeculativeDecoder("toy", "toy:2", num_draft_tokens=3)
    assert repr(decoder) == (
        "SpeculativeDecoder('toy', 'toy:2', drafter='model', num_draft_tokens=3, acceptance='auto', "
        "reproducible=True, device='cpu')"
    )


@pytest.mark.parametrize("kind", ["pickle", "deepcopy", "copy"])
def test_copies_and_pickles_are_refused_in_one_line(kind: str) -> None:
    decoder = SpeculativeDecoder("toy")
    action = {"pickle": pickle.dumps, "deepcopy": copy.deepcopy, "copy": copy.copy}[kind]
    with pytest.raises(UsageError, match=r"^a SpeculativeDecoder holds .* allowed: to pickle its arguments") as refusal:
        action(decoder)
    assert "\n" not in str(refusal.value)


def test_a_model_with_a_decoder_can_still_be_copied_and_pickled() -> None:
    model = fresh("llama")
    text, params = prompts([6])[0], SamplingParams(max_tokens=4)
    expected = SpeculativeDecoder(model).generate(text, params).token_ids
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert SpeculativeDecoder(other).generate(text, params).token_ids == expected
