"""What may be recommended: a drafter, its draft length and its draft model; and all of these over one loaded target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slipstream import drafters
from slipstream.bench.arms import PLAIN
from slipstream.bench.lineup import Lineup
from slipstream.bench.records import Arm
from slipstream.decoder import SpeculativeDecoder
from slipstream.errors import UsageError
from slipstream.sampling.params import SamplingParams


@dataclass(frozen=True)
class Candidate:
    """One way to speculate. length: None for the drafter's own; draft: the draft model, as the user named it."""

    drafter: str
    length: int | None = None
    draft: str | None = None

    @property
    def kind(self) -> str:
        """The drafter, with "auto" resolved."""
        if self.drafter != "auto":
            return self.drafter
        return drafters.preferred(draft_model=self.draft is not None, costs=True)

    @property
    def tokens(self) -> int:
        """Tokens asked for in a round."""
        return drafters.traits(self.kind).default_length if self.length is None else self.length

    @property
    def setting(self) -> str:
        """As an arm of a benchmark is written, without the draft model."""
        return self.drafter if self.length is None else f"{self.drafter}@{self.length}"


def predictable(drafts: Sequence[str]) -> list[Candidate]:
    """The drafters whose speed follows from costs and acceptance, the cheapest to set up first; lengths are open."""
    known = {name: drafters.traits(name) for name in drafters.names()}
    names = [name for name, traits in known.items() if traits.in_other_engines]
    alone = [Candidate(name) for name in names if not known[name].needs_draft_model]
    return alone + [Candidate(name, draft=draft) for draft in drafts for name in names if known[name].needs_draft_model]


def unpredictable(drafts: Sequence[str]) -> list[Candidate]:
    """What is measured at its own draft length only: lengths and drafters chosen on the way."""
    if not drafts:
        return [Candidate("auto")]
    return [Candidate(name, draft=draft) for draft in drafts for name in ("auto", "model")]


class SearchSpace:
    """One target, any number of draft models, and a lineup that arms join when they are first asked for.

    decoder: has the first of `drafts` as its draft model, or none.
    """

    def __init__(
        self, decoder: SpeculativeDecoder, drafts: Sequence[str], params: SamplingParams, *, chat: bool = True
    ) -> None:
        if twice := [draft for draft in drafts if drafts.count(draft) > 1]:
            raise UsageError(f"draft {twice[0]!r} is given twice; allowed: each draft model once")
        self.drafts = list(drafts)
        self.plain = Arm(PLAIN, PLAIN)
        self.lineup = Lineup(decoder, [self.plain], params, chat=chat)
        self._decoders = {draft: decoder.with_draft(draft) for draft in self.drafts[1:]}

    def name(self, candidate: Candidate) -> str:
        """The arm's name: its draft model is part of it where there are several."""
        shown = candidate.draft is not None and len(self.drafts) > 1
        return f"{candidate.setting} {candidate.draft}" if shown else candidate.setting

    def arm(self, candidate: Candidate) -> Arm:
        """The arm of a candidate, in the lineup from now on."""
        arm = Arm(self.name(candidate), candidate.drafter, candidate.length)
        if arm.name not in self.lineup.decoders:
            self.lineup.decoders[arm.name] = self.decoder(candidate)
            self.lineup.arms.append(arm)
        return arm

    def decoder(self, candidate: Candidate) -> SpeculativeDecoder:
        """The loaded models under a candidate's settings."""
        base = self._decoders.get(candidate.draft or "", self.lineup.decoder)
        return base.using(candidate.drafter, num_draft_tokens=candidate.length)

    def stops_early(self, candidate: Candidate) -> bool:
        """Whether the candidate's draft model ends drafts where it is unsure."""
        on_cpu = self.lineup.decoder.target.backend.device.type == "cpu"
        return on_cpu and candidate.length is None and drafters.traits(candidate.kind).needs_draft_model


def at_length(candidate: Candidate, length: int) -> Candidate:
    """The same drafter and draft model at a draft length."""
    return replace(candidate, length=length)
