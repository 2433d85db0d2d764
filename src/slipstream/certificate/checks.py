"""The certificate: does this pair of models, with this drafter and rule, generate exactly what the target alone would?

Three kinds of evidence. Texts: greedy and seeded speculative decoding against plain decoding, one by one, in a batch
and option by option. Distributions: frequencies of many sampled texts against the distribution computed from the
target's own logits. Power: the same test on deliberately wrong rules, which it must catch, or it shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from slipstream.certificate.distribution_checks import POWER_RULES, DistributionChecks
from slipstream.certificate.finding import Check, Finding
from slipstream.certificate.text_checks import OPTIONS, TextChecks
from slipstream.decoder import SpeculativeDecoder
from slipstream.reproducibility.calibration import calibrate
from slipstream.text.prompts import NamedPrompt

SHARE_OF_TEXTS = 0.6  # of the budget; the tests of distributions get the rest


@dataclass
class Verifier:
    """Runs the checks on a decoder.

    max_tokens: length of the compared texts, less where the budget does not allow it. budget: seconds to aim for; the
    tests of distributions make a fixed least number of texts whatever it is.
    """

    decoder: SpeculativeDecoder
    prompts: Sequence[NamedPrompt]
    max_tokens: int = 48
    budget: float = 120.0

    def __post_init__(self) -> None:
        texts = TextChecks(self.decoder, self.prompts, self.max_tokens, SHARE_OF_TEXTS * self.budget)
        distributions = DistributionChecks(self.decoder, perf_counter() + self.budget)
        self._checks: dict[str, Callable[[], Finding]] = {}
        if self.decoder.reproducible:
            self._checks["forward shapes agree"] = self._shapes
        self._checks |= {
            "greedy text, one by one": texts.greedy,
            "greedy text, in a batch": texts.batch,
            "seeded text, one by one": texts.seeded,
            **{f"option {name}": partial(texts.option, given) for name, given in OPTIONS.items()},
            "distribution of sampled text": distributions.sampled,
            **{f"power: {rule} is caught": partial(distributions.power, rule) for rule in POWER_RULES},
        }

    @property
    def num_checks(self) -> int:
        """How many checks `run` makes."""
        return len(self._checks)

    def run(self) -> Iterator[Check]:
        """All checks, one after another."""
        for name, check in self._checks.items():
            started = perf_counter()
            found = check()
            yield Check(name, found.outcome, found.detail, perf_counter() - started)

    def _shapes(self) -> Finding:
        """Whether a new calibration finds the shapes in use to agree bit for bit."""
        used = self.decoder.calibration
        assert used is not None
        found = calibrate(self.decoder.target.backend, self.decoder.config.max_batch_size)
        self.decoder.forget()
        agree = set(used.widths) <= set(found.widths) and set(used.together) <= {*found.widths, *found.together}
        agree = agree and set(used.attended_lengths) <= set(found.attended_lengths)
        passed = agree and used.attended_unit % found.attended_unit == 0 and found.prompts >= used.prompts
        several = f"; of several rows {', '.join(map(str, used.together))} as well" if used.together else ""
        lengths = used.attended_lengths
        shorter = f" or {len(lengths)} shorter ones up to {lengths[-1]}" if lengths else ""
        prompts = "prompt chunks as well" if used.prompts else "prompt chunks differ and are kept whole"
        widths = f"widths {', '.join(map(str, used.widths))}{several}"
        return Finding.of(
            passed, f"{widths}; attended lengths in multiples of {used.attended_unit}{shorter}; {prompts}"
        )
