"""What a check of the certificate found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["pass", "FAIL", "not applicable"]


@dataclass(frozen=True)
class Finding:
    """The outcome of a check and the evidence for it, or why it does not apply."""

    outcome: Outcome
    detail: str

    @classmethod
    def of(cls, passed: bool, detail: str) -> Finding:
        """Of a check that was made."""
        return cls("pass" if passed else "FAIL", detail)


def not_applicable(reason: str) -> Finding:
    """Of a check that this decoder gives nothing to check."""
    return Finding("not applicable", reason)


@dataclass(frozen=True)
class Check:
    """One line of the certificate."""

    name: str
    outcome: Outcome
    detail: str
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether the check was made and found nothing wrong."""
        return self.outcome == "pass"

    @property
    def failed(self) -> bool:
        """Whether the check was made and found something wrong."""
        return self.outcome == "FAIL"

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `passed` is null where the check does not apply."""
        return vars(self) | {"passed": None if self.outcome == "not applicable" else self.passed}
