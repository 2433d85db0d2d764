"""The flags of structured output: what the text of a request must be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from slipstream.apps.cli.options import option
from slipstream.constraints.constraint import Constraint
from slipstream.errors import UsageError
from slipstream.sampling.params import SamplingParams

STRUCTURE = "Structured output"


@dataclass(frozen=True)
class Structure:
    """At most one kind of constraint."""

    json_schema: Annotated[
        Path | None, option(STRUCTURE, "--json-schema", text="JSON by the schema in this file", metavar="FILE")
    ] = None
    json_object: Annotated[bool, option(STRUCTURE, "--json-object", text="any JSON object")] = False
    regex: Annotated[
        str | None,
        option(
            STRUCTURE, "--regex", text="a text that matches this regular expression from end to end", metavar="TEXT"
        ),
    ] = None
    choice: Annotated[
        list[str],
        option(STRUCTURE, "--choice", text="this text or another --choice; given several times", metavar="TEXT"),
    ] = ()  # type: ignore[assignment]
    grammar: Annotated[
        Path | None,
        option(STRUCTURE, "--grammar", text="a text of the grammar in this file (llguidance's Lark)", metavar="FILE"),
    ] = None
    whitespace: Annotated[
        str,
        option(STRUCTURE, "--whitespace", text="of JSON: compact | spaced | flexible", metavar="NAME"),
    ] = Constraint.whitespace

    def of(self, params: SamplingParams) -> SamplingParams:
        """The sampling options with the constraint of these flags, if there is one."""
        given: dict[str, Any] = {
            "json_schema": self.json_schema and _read("--json-schema", self.json_schema),
            "json_object": self.json_object,
            "regex": self.regex,
            "choice": list(self.choice) or None,
            "grammar": self.grammar and _read("--grammar", self.grammar),
        }
        if all(value in (None, False) for value in given.values()):
            if self.whitespace != Constraint.whitespace:
                raise UsageError(
                    f"--whitespace {self.whitespace!r} alone; allowed: with --json-schema or --json-object"
                )
            return params
        return replace(params, constraint=Constraint(**given, whitespace=self.whitespace))


def _read(flag: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {str(file)!r} cannot be read: {error}; allowed: a readable text file") from None
