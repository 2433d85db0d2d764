"""The benchmark of stateful models runs and compares texts."""

import pytest
import stateful
import typer


@pytest.mark.slow
def test_drafts_right_and_wrong_give_the_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        stateful.main(layers=4, hidden=64, vocab=100, tokens=8, prompts=2)
    assert ended.value.exit_code == 0
    out = capsys.readouterr().out
    lines = {words[1]: words for line in out.splitlines() if len(words := line.split()) > 3}
    assert all(" ".join(lines[arm][-4:-1]) == "2 of 2" for arm in ("none", "copies", "wrong"))
    assert "MB, besides its keys and values" in out
