"""Whether a measured text is plain decoding's own."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from slipstream.bench.arms import PLAIN
from slipstream.bench.comparison import Referee
from slipstream.bench.lineup import Lineup
from slipstream.bench.plan import BenchPrompt, Group
from slipstream.bench.records import Arm, Run, VerdictName
from slipstream.sampling.params import SamplingParams

_CHANGE_LOGITS = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "bad_words", "min_tokens", "logits_processors"),
)

log = logging.getLogger("slipstream")


@dataclass
class Judge:
    """Compares with plain decoding of each prompt alone: the first text of the arm `none`, or one made here, untimed.

    Greedy texts must be identical or part at a tie; sampled ones must be identical where every token is the target's
    own draw, and are not compared elsewhere.
    """

    lineup: Lineup
    _texts: dict[tuple[str, float], list[int]] = field(default_factory=dict)
    _judged: dict[tuple[str, str, tuple[int, ...]], VerdictName] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._referee = Referee(self.lineup.decoder)

    def recall(self, runs: Iterable[Run]) -> None:
        """Take the reference texts out of runs made before."""
        for run in runs:
            for name, text, verdict in zip(run.prompts, run.texts, run.verdicts, strict=True):
                if verdict == "reference":
                    self._texts[name, self.lineup.temperature(run.arm)] = text

    def judge(self, arm: Arm, group: Group, texts: Sequence[list[int]]) -> list[VerdictName]:
        """One verdict per prompt of the group."""
        is_plain = arm.drafter == PLAIN and arm.fast is None and len(group.prompts) == 1
        return [self._one(arm, prompt, text, is_plain) for prompt, text in zip(group.prompts, texts, strict=True)]

    def _one(self, arm: Arm, prompt: BenchPrompt, text: list[int], is_plain: bool) -> VerdictName:
        params = self.lineup.params_of(arm, prompt.index)
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
            self._judged[known] = self._compare(arm, prompt, params, self._texts[at], text)
        return self._judged[known]

    def _compare(
        self, arm: Arm, prompt: BenchPrompt, params: SamplingParams, expected: list[int], text: list[int]
    ) -> VerdictName:
        if text == expected:
            return "identical"
        defaults = SamplingParams()
        own_logits = all(getattr(params, name) == getattr(defaults, name) for name in _CHANGE_LOGITS)
        if params.temperature > 0 or not own_logits:
            # no referee can look for a tie here, so a difference counts where rounding cannot explain it
            return "different" if self.lineup.same_bits(arm) else "not compared"
        try:
            difference = self._referee.judge(self.lineup.encode(prompt), expected, text, greedy=True)
        except Exception as error:  # the full-precision model may not fit: then nothing shows that this is a tie
            log.warning("no referee for %s on %s: %s", arm.name, prompt.id, error)
            return "different"
        return "tie" if difference is not None and difference.tie else "different"
