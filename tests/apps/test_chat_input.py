"""What may be typed after a slash command: options, methods, mistakes and completion."""

import pytest

from slipstream import SamplingParams
from slipstream.apps.chat.slash_commands import ALIASES, COMMANDS, complete
from tests.support.chat_fakes import refused, toy, type_in
from tests.support.markers import subcases


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/sampling greedy", (0.0, 0, 1.0, 0.0)),
        ("/sampling multinomial", (1.0, 0, 1.0, 0.0)),
        ("/sampling multinomial 0.7 0.1", (0.7, 0, 1.0, 0.1)),
        ("/sampling topk 0.8 20", (0.8, 20, 1.0, 0.0)),
        ("/sampling nucleus 0.7 0.9", (0.7, 0, 0.9, 0.0)),
        ("/sampling nucleus top_p=0.5 min_p=0.05", (1.0, 0, 0.5, 0.05)),
        ("/sampling topknucleus 0.7 30 0.8", (0.7, 30, 0.8, 0.0)),
    ],
)
def test_sampling_methods(line: str, expected: tuple[float, ...]) -> None:
    chat = toy(temperature=0.3, top_k=9, top_p=0.2, min_p=0.3)
    type_in(chat, line)
    p = chat.params
    assert (p.temperature, p.top_k, p.top_p, p.min_p) == expected


@subcases(
    "line, name, value",
    [
        ("/set repetition_penalty 1.2", "repetition_penalty", 1.2),
        ("/set stop ###", "stop", ("###",)),
        ("/set stop 7", "stop", ("7",)),
        (r'/set stop ["\n", "two words"]', "stop", ["\n", "two words"]),
        ('/set logit_bias {"5": -2}', "logit_bias", {5: -2}),
        ('/set bad_words ["stone"]', "bad_words", ["stone"]),
        ("/set ignore_eos on", "ignore_eos", True),
        ("/set min_tokens 3", "min_tokens", 3),
        ("/length 77", "max_tokens", 77),
        ("/seed 4", "seed", 4),
    ],
)
def test_any_sampling_option_can_be_set_and_unset(line: str, name: str, value: object) -> None:
    chat = toy(max_tokens=24)
    type_in(chat, line)
    assert getattr(chat.params, name) == value
    type_in(chat, f"/set {name} none")
    assert getattr(chat.params, name) == getattr(SamplingParams(), name)
    assert f"{name}: " in type_in(chat, "/set")


@subcases(
    "line, part",
    [
        ("/gama 3", "did you mean /gamma"),
        ("/xyzzyx", "/help lists them"),
        ("/", "unknown command '/'"),
        ("/gamma many", "num_draft_tokens='many'; allowed: 'auto', 'chain', a whole number from 0 to 64"),
        ("/gamma 65", "allowed"),
        ("/gamma -1", "allowed"),
        ("/drafter oracle", "allowed: auto, "),
        ("/drafter model", "needs a draft model"),
        ("/acceptance luck", "allowed"),
        ("/speculative maybe", "allowed: on, off"),
        ("/debug 1", "allowed: on, off"),
        ("/filler 1", "allowed: on, off"),
        ("/cache empty", "allowed: on, off, clear"),
        ("/length 0", "max_tokens=0; allowed"),
        ("/length long", "max_tokens='long'; allowed"),
        ("/seed -1", "seed=-1; allowed"),
        ("/set", None),
        ("/set temp 1", "allowed: temperature, top_k"),
        ("/set logits_processors x", "allowed: temperature"),
        ("/set temperature NaN", "temperature=nan; allowed"),
        ('/set logit_bias {"x": 1}', "logit_bias"),
        ("/set top_k 2.5", "top_k=2.5; allowed"),
        ("/sampling beam", "allowed: greedy, multinomial, topk, nucleus, topknucleus"),
        ("/sampling greedy 1", "allowed: greedy alone"),
        ("/sampling nucleus hot", "temperature 'hot'; allowed: /sampling nucleus [temperature] [top_p] [min_p]"),
        ("/sampling nucleus 0", "temperature 0 is greedy"),
        ("/sampling nucleus 1 2", "top_p=2.0; allowed"),
        ("/sampling nucleus 1 1 1 1", "allowed: /sampling nucleus"),
        ("/sampling topk top_p=0.3", "allowed: /sampling topk"),
        ("/sampling topk 1 2.5", "top_k '2.5'"),
        ("/compare", "no turn yet"),
        ("/retry", "no turn yet"),
        ("/reset now", "allowed: /reset alone"),
        ("/quit now", "allowed: /quit alone"),
        ("/save", "allowed: /save FILE"),
        ("/save /no/such/folder/file", "cannot be written"),
        ("/help nothing", "unknown command '/nothing'"),
        ("/target", None),
        ("/target toy:99", "ORDER from 1 to 16"),
        ("/draft", None),
    ],
)
def test_wrong_input_is_one_line_and_changes_nothing(line: str, part: str | None) -> None:
    chat = toy()
    before = (chat.decoder, chat.params, chat.speculative, chat.cache, chat.debug)
    if part is None:
        type_in(chat, line)  # without an argument it only shows
    else:
        assert part in refused(chat, line)
    assert (chat.decoder, chat.params, chat.speculative, chat.cache, chat.debug) == before and chat.turns == []


def test_a_space_makes_a_message_of_a_slash_and_an_empty_line_is_nothing() -> None:
    chat = toy()
    type_in(chat, " /usr is a folder", "", "   ")
    assert [turn.user for turn in chat.turns] == ["/usr is a folder"]


def test_completion_knows_commands_and_their_arguments() -> None:
    assert complete("/") == sorted([*COMMANDS, *ALIASES])
    assert complete("/st") == ["/stats"] and complete("/sampling n") == ["nucleus"]
    assert complete("/set te") == ["temperature"] and complete("/cache c") == ["clear"]
    assert "none" in complete("/draft ") and complete("/target t") == ["toy"] and "/gamma" in complete("/help ")
    assert {"auto", "ngram"} <= set(complete("/drafter "))
    assert complete("/length-of-draft a") == ["auto"]
    assert complete("hello") == complete("/nothing x") == complete("/set stop x") == []
