"""Whether a measured text is plain decoding's own."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from slipstream.bench.arms import OF_LLAMA_CPP, PLAIN
from slipstream.bench.lineup import Lineup
from slipstream.bench.plan import BenchPrompt, Group
from slipstream.bench.records import Arm, Run, VerdictName
from slipstream.certificate.parity import Difference, TieJudge, plain_difference

log = logging.getLogger("slipstream")


@dataclass
class Judge:
    """Compares with plain decoding of each prompt alone: the first text of the arm `none`, or one made here, untimed.

    Greedy texts must be identical or part at a tie; so must sampled ones where every token is the target's own draw.
    Elsewhere sampled texts are not compared.
    """

    lineup: Lineup
    _texts: dict[tuple[str, float], list[int]] = field(default_factory=dict)
    _judged: dict[tuple[str, str, tuple[int, ...]], Difference | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ties = TieJudge(self.lineup.decoder)

    def recall(self, runs: Iterable[Run]) -> None:
        """Take the reference texts out of runs made before; those that failed have none."""
        for run in runs:
            if run.error is not None:
                continue
            for name, text, verdict in zip(run.prompts, run.texts, run.verdicts, strict=True):
                if verdict == "reference":
                    self._texts[name, self.lineup.temperature(run.arm)] = text

    def judge(self, arm: Arm, group: Group, texts: Sequence[list[int]]) -> list[VerdictName]:
        """One verdict per prompt of the group."""
        is_plain = arm.drafter == PLAIN and arm.fast is None and len(group.prompts) == 1
        return [self._one(arm, prompt, text, is_plain) for prompt, text in zip(group.prompts, texts, strict=True)]

    def difference(self, arm: Arm, prompt: BenchPrompt, expected: list[int], text: list[int]) -> Difference | None:
        """The first difference of an arm's text from the one expected, explained; None if they are equal."""
        found, params = plain_difference(expected, text), self.lineup.params_of(arm, prompt)
        if found is None or arm.baseline in OF_LLAMA_CPP:  # arithmetic of its own: no rounding of ours explains it
            return found
        same_bits, coupled = self.lineup.same_bits(arm), self.lineup.coupled(arm, params)
        try:
            ids = self.lineup.encode(prompt)
            found = self.ties.judge(ids, expected, text, params, coupled=coupled, same_bits=same_bits)
        except Exception as error:  # the full-precision model may not fit: then nothing shows that this is a tie
            log.warning("the first difference of %s on %s cannot be judged: %s", arm.name, prompt.id, error)
        return found

    def _one(self, arm: Arm, prompt: BenchPrompt, text: list[int], is_plain: bool) -> VerdictName:
        params = self.lineup.params_of(arm, prompt)
        if not self.lineup.coupled(arm, params):
            return "not compared"
        at = prompt.id, params.temperature
        if at not in self._texts:
            if is_plain:
                self._texts[at] = text
                return "reference"
            try:
                self._texts[at] = self.lineup.plain_text(prompt, params)
            except Exception as error:  # whatever a model may raise: the speed stands, the text is unproven
                log.warning("no text of plain decoding for %s: %s", prompt.id, error)
                return "not compared"
        known = arm.name, prompt.id, tuple(text)
        if known not in self._judged:
            self._judged[known] = self.difference(arm, prompt, self._texts[at], text)
        return _verdict(self._judged[known])


def _verdict(difference: Difference | None) -> VerdictName:
    if difference is None:
        return "identical"
    if not difference.compared:
        return "not compared"
    return "tie" if difference.tie else "different"
