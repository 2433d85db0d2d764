"""A misspelt name is answered with the known name nearest to it; what the system says of files reads like our words."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest

from slipstream.errors import did_you_mean, first_line, one_line, os_reason, with_class
from tests.support.chat_fakes import refused, toy


def test_only_near_names_are_suggested() -> None:
    assert did_you_mean("ngrm", "ngram", "suffix") == "; did you mean 'ngram'?"
    assert did_you_mean("xyz", "ngram", "suffix") == did_you_mean("topk", "topk") == did_you_mean("x") == ""


def test_slash_commands_suggest_near_names() -> None:
    chat = toy()
    assert "did you mean 'nucleus'?" in refused(chat, "/sampling nuclues")
    assert "did you mean 'temperature'?" in refused(chat, "/set temprature 1")
    assert "did you mean 'ngram'?" in refused(chat, "/drafter ngarm")


def test_what_the_system_says_of_a_file_is_told_in_small_letters() -> None:
    assert os_reason(OSError(errno.EACCES, os.strerror(errno.EACCES))) == "permission denied"
    assert os_reason(OSError("Odd")) == "odd"


@pytest.mark.parametrize("tell", [first_line, one_line, with_class])
def test_an_error_whose_message_says_little_is_told_with_its_class(tell: Callable[[BaseException], str]) -> None:
    assert tell(KeyError("nope")) == "KeyError: 'nope'"
    assert tell(ZeroDivisionError("division by zero")) == "ZeroDivisionError: division by zero"
    assert tell(ValueError()) == "ValueError"
