"""Engines and runs of them for tests: the parts that a decoder would put together."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from slipstream.core.acceptance import Rule
from slipstream.core.interfaces import Drafter, Policy, Source
from slipstream.core.loop import Engine
from slipstream.core.rounds import Round
from slipstream.core.scheduler import Scheduler
from slipstream.core.session import Session
from slipstream.core.types import Draft, Row
from slipstream.sampling.sampler import Sampler


def engine(
    target: Session,
    drafter: Drafter,
    policy: Policy,
    acceptance: str | Rule = "auto",
    draft_session: Session | None = None,
) -> Engine:
    return Engine(target, [Source(drafter)], policy, Sampler, acceptance, draft_session)


@dataclass
class InTurn:
    """Asks sources one after the other, as the loop does, as far as a policy wants their drafts."""

    sources: Sequence[Source]
    policy: Policy

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        draft = Draft.empty(len(rows), sampler.device)
        for source in self.sources:
            wanted = self.policy.lengths(rows, source, draft, lengths)
            if any(wanted):
                proposed = source.drafter.propose(rows, wanted, sampler)
                draft = Draft.where([not length for length in wanted], draft, proposed)
        return draft


def run(loop_engine: Engine, rows: Iterable[Row], max_batch_size: int = 8) -> Iterator[Round]:
    return Scheduler(loop_engine, max_batch_size).run(rows)
