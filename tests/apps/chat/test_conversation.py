"""A conversation: its prompts, interruptions, reuse of the cache, and the command line from a pipe."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.apps import cli
from slipstream.apps.chat.conversation import Chat
from slipstream.apps.cli import chat as chat_cli
from slipstream.apps.cli.consoles import Stream
from slipstream.certificate.parity import first_difference
from tests.apps.chat.test_markdown_stream import left_on_screen
from tests.support import tiny_models
from tests.support.chat_fakes import Recorder, face, letters, refused, toy, type_in


def test_an_answer_streams_and_equals_the_decoders() -> None:
    chat = toy()
    type_in(chat, "The heron")
    expected = SpeculativeDecoder("toy").generate("The heron", chat.params, chat=False)
    assert "".join(face(chat).pieces) == expected.text + "\n"
    assert chat.last.token_ids == expected.token_ids and len(face(chat).pieces) > 2
    assert face(chat).notes[-1].startswith("24 tokens, ") and face(chat).notes[-1].endswith("ended by length")
    assert "acceptance rate" in face(chat).notes[-1] and "tokens per forward" in face(chat).notes[-1]


def test_a_model_without_a_template_continues_the_text_and_says_so_once() -> None:
    chat = toy()
    type_in(chat, "/system once", "The heron", "A sparrow")
    first, second = chat.turns
    assert chat.decoder.tokenizer is not None
    assert chat.decoder.tokenizer.decode(second.prompt_ids) == f"once\nThe heron{first.answer}\nA sparrow"
    assert sum("no chat template" in note for note in face(chat).notes) == 1


def test_a_template_gets_the_whole_conversation() -> None:
    chat = letters(reproducible=False)
    type_in(chat, "/system be kind", "hello", "again")
    answer = chat.turns[0].answer
    assert chat.messages[:3] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": answer},
    ]
    assert chat.turns[1].prompt_ids == chat.decoder.encode([*chat.messages[:3], {"role": "user", "content": "again"}])


def test_answers_begin_as_asked_and_the_template_gets_its_variables() -> None:
    chat = letters(reproducible=False)
    inner = chat.decoder.tokenizer.inner
    inner.chat_template = "{% if loud %}x{% endif %}" + inner.chat_template
    chat.answer_start, chat.template_kwargs = "so", {"loud": True}
    type_in(chat, "hello")
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "so"}]
    options: Any = {"chat_template_kwargs": {"loud": True}, "continue_final_message": True}
    (turn,) = chat.turns
    assert turn.prompt_ids == chat.decoder.encode(messages, **options) and turn.answer.startswith("so")
    assert "".join(face(chat).pieces) == turn.answer + "\n"
    bare = toy()
    bare.answer_start = "so"
    assert "--answer-start needs a chat template, which 'toy' lacks" in refused(bare, "hello")


@pytest.mark.slow
def test_a_thought_is_shown_apart_and_goes_back_to_templates_that_read_it() -> None:
    shown = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    inner = tiny_models.byte_tokenizer(
        f"{{% for m in messages %}}{{{{ m.role }}}}:{shown}{{{{ m.content }}}}\n{{% endfor %}}assistant:<think>\n"
    )
    model = tiny_models.fresh("llama", vocab_size=len(inner))
    decoder = SpeculativeDecoder(model, tokenizer=inner, drafter="suffix")
    params = SamplingParams(max_tokens=40, thinking_token_budget=12, logit_bias={0: -1e9, 1: -1e9, 2: -1e9})
    chat = Chat(decoder, Recorder(), params)
    type_in(chat, "hello", "again")
    first = chat.turns[0]
    assert first.thought and "".join(face(chat).thoughts).startswith(first.thought)
    assert first.answer and "think" not in first.answer and "".join(face(chat).pieces).startswith(first.answer)
    assert f"<think>{first.thought}</think>{first.answer}" in inner.decode(chat.last.prompt_ids)
    assert type_in(chat, "/thought") == chat.last.thought
    assert chat.last.to_dict()["thought"] == chat.last.thought


def test_the_second_turn_computes_only_what_is_new() -> None:
    chat = letters(reproducible=False)
    type_in(chat, "one two three " * 5, "four", "five")
    for before, turn in zip(chat.turns, chat.turns[1:], strict=False):
        cached = [*before.prompt_ids, *before.token_ids]
        assert turn.prompt_ids[: len(cached)] == cached  # the answer re-encodes to the tokens it was made of
        # the last token of an answer is not cached yet
        assert turn.prefilled == len(turn.prompt_ids) - len(cached) + 1


@pytest.mark.slow
@pytest.mark.parametrize("whole_chunks", [False, True])
def test_reproducible_turns_reuse_the_cache_and_give_the_text_of_an_empty_one(whole_chunks: bool) -> None:
    chat = letters(reproducible=True)
    session = chat.decoder._target_session
    if whole_chunks:  # as on machines where prompt chunks and narrow forwards differ in bits
        session.table.shapes = replace(session.shapes, reuse=session.shapes.chunk)
        session.table.returns_prompt_logits = False
    elif session.shapes.reuse > 1:
        pytest.skip("prompt chunks do not agree with narrow forwards on this machine")
    type_in(chat, "one two three " * 20, "four five six " * 20, "seven")
    for before, turn in zip(chat.turns, chat.turns[1:], strict=False):
        cached = [*before.prompt_ids, *before.token_ids]
        reused = (len(before.prompt_ids) - 1) // 256 * 256 if whole_chunks else len(cached) - 1
        uncached = 1 if whole_chunks else 0  # there the last prompt token has its own forward
        assert reused >= 256 and turn.prefilled == len(turn.prompt_ids) - uncached - reused
        chat.decoder.forget()
        assert chat.decoder.generate(turn.prompt_ids, turn.params).token_ids == turn.token_ids


def test_reuse_ends_where_an_answer_re_encodes_differently() -> None:
    chat = letters(reproducible=False)
    chat.params = SamplingParams(max_tokens=20, temperature=1.0, seed=0, logit_bias={1: 8.0}, ignore_eos=True)
    type_in(chat, "one two three " * 5, "four")
    first, second = chat.turns
    assert 1 in first.token_ids  # a special token, which has no text
    shared = first_difference(second.prompt_ids, [*first.prompt_ids, *first.token_ids])
    assert shared is not None and len(first.prompt_ids) <= shared
    assert second.prefilled == len(second.prompt_ids) - shared


def test_an_interrupted_answer_stays_in_the_conversation(cache_audit: None) -> None:
    chat = toy(max_tokens=60)
    face(chat).stop_after = 5
    type_in(chat, "The heron")
    turn = chat.last
    assert turn.finish_reason == "interrupted" and len(turn.rounds) == 5
    assert turn.answer == "".join(face(chat).pieces[:-1]) and "ended by interrupted" in face(chat).notes[-1]
    type_in(chat, "The sparrow")
    assert chat.decoder.tokenizer is not None and turn.answer in chat.decoder.tokenizer.decode(chat.last.prompt_ids)
    fresh = SpeculativeDecoder("toy").generate(chat.last.prompt_ids, chat.params)
    assert fresh.token_ids == chat.last.token_ids


@pytest.mark.parametrize("forward", [1, 2, 4])
def test_an_interruption_inside_a_forward_leaves_the_cache_correct(
    forward: int, monkeypatch, cache_audit: None
) -> None:
    chat = letters(reproducible=False)
    backend, calls = chat.decoder.target.backend, iter(range(1, 1000))
    run = backend._forward_rows

    def interrupted(*args: Any, **options: Any) -> Any:
        out = run(*args, **options)
        if next(calls) == forward:
            raise KeyboardInterrupt
        return out

    monkeypatch.setattr(backend, "_forward_rows", interrupted)
    type_in(chat, "one two three")
    dropped = "interrupted before the first token: nothing is kept"
    assert (len(chat.turns) == 0) == (forward < 2) == (dropped in face(chat).notes)
    monkeypatch.undo()
    type_in(chat, "one two four")
    chat.decoder.forget()
    assert chat.decoder.generate(chat.last.prompt_ids, chat.params).token_ids == chat.last.token_ids


@pytest.mark.slow
def test_an_answer_is_cut_to_the_context_with_a_note_and_a_full_context_is_refused() -> None:
    chat = letters(reproducible=False)
    type_in(chat, "/length 100", "a" * 950)
    assert len(chat.last.token_ids) < 100 and any("room for" in note for note in face(chat).notes)
    assert "/reset" in refused(chat, "b" * 200)
    type_in(Chat(chat.decoder, Recorder(), chat.params), "after a reset all is well")


def test_a_model_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        Chat(SpeculativeDecoder(tiny_models.shared("llama"), reproducible=False), Recorder())


def piped(monkeypatch, capsys, text: str, *flags: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["slipstream", "chat", "--target", "toy", *flags])
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    with pytest.raises(SystemExit) as exited:
        cli.main()
    captured = capsys.readouterr()
    return int(exited.value.code or 0), captured.out, captured.err


def test_a_pipe_is_read_line_by_line(monkeypatch, capsys) -> None:
    text = "/help quit\nThe heron\n/draft-lenght\n/quit\nnever reached\n"
    code, out, err = piped(monkeypatch, capsys, text, "--max-tokens", "12", "--system", "A :fish: [b]story[/b].")
    decoder = SpeculativeDecoder("toy")
    answer = decoder.generate("A :fish: [b]story[/b].\nThe heron", SamplingParams(max_tokens=12), chat=False).text
    assert code == 0 and out == f"/quit  leave\n{answer}\n"
    assert "12 tokens, " in err and "did you mean /draft-length" in err


def test_the_last_conversation_goes_on_in_a_pipe_too(monkeypatch, capsys, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path))
    code, _, err = piped(monkeypatch, capsys, "", "--continue")
    assert code == 2 and "--continue: there is no" in err and "allowed: after an answer without --no-history" in err
    code, _, err = piped(monkeypatch, capsys, "", "--no-history", "--history", "x")
    assert code == 2 and err == "error: --no-history with --history 'x'; allowed: one of them\n"
    messages = [{"role": "user", "content": "The heron"}, {"role": "assistant", "content": " stood."}]
    (tmp_path / "last_conversation.json").write_text(json.dumps({"messages": messages}))
    code, out, _ = piped(monkeypatch, capsys, "The sparrow\n", "--continue", "--max-tokens", "12")
    answer = SpeculativeDecoder("toy").generate("The heron\n stood.\nThe sparrow", max_tokens=12, chat=False).text
    assert (
        code == 0 and out == f"2 messages of {tmp_path / 'last_conversation.json'}; the last one:\n stood.\n{answer}\n"
    )
    assert json.loads((tmp_path / "last_conversation.json").read_text())["messages"] == messages  # pipes are not kept


def test_text_is_printed_unchanged(capsys) -> None:
    screen = chat_cli.Screen()
    screen.token("a :fish: [bold]b[/bold]\n")
    screen.show("c :fish: [red]")
    screen.error("d [e] :fish:")
    captured = capsys.readouterr()
    assert captured.out == "a :fish: [bold]b[/bold]\nc :fish: [red]\n" and captured.err == "error: d [e] :fish:\n"


def test_a_terminal_folds_a_thought_into_one_line_and_a_pipe_leaves_it_out(monkeypatch, capsys) -> None:
    for is_terminal in (False, True):
        written = io.StringIO()
        console = Stream(file=written, width=60, force_terminal=is_terminal, color_system=None)
        monkeypatch.setattr(chat_cli, "out", console)
        screen = chat_cli.Screen()
        for text in ("It flies, ", "so it is a heron."):
            screen.thought(text)
        screen.token("A heron.\n")
        screen.close()
        if is_terminal:
            assert "so it is a heron." in written.getvalue()  # while the model thinks
            assert left_on_screen(written.getvalue()) == "Thought: 7 words; /thought shows them\nA heron."
        else:
            assert not written.getvalue() and capsys.readouterr().out == "A heron.\n"


class Keyboard(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("option", "part", "code"),
    [
        ("--no-history", "prompt_toolkit is not installed; run: pip install prompt_toolkit", 1),
        ("--history=/dev/null/x/y", "--history '/dev/null/x/y' cannot be written", 2),
    ],
)
def test_a_missing_package_and_a_bad_history_are_one_line(option, part, code, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "argv", ["slipstream", "chat", "--target", "toy", option])
    monkeypatch.setattr(sys, "stdin", Keyboard())
    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    with pytest.raises(SystemExit) as exited:
        cli.main()
    assert exited.value.code == code and part in " ".join(capsys.readouterr().err.split())
