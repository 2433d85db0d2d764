"""Engines and runs of them for tests: the parts that a decoder would put together."""

from collections.abc import Iterable, Iterator

from slipstream.core.acceptance import Rule
from slipstream.core.interfaces import Drafter, Policy
from slipstream.core.loop import Engine
from slipstream.core.rounds import Round
from slipstream.core.scheduler import Scheduler
from slipstream.core.session import Session
from slipstream.core.types import Row
from slipstream.sampling.sampler import Sampler


def engine(
    target: Session,
    drafter: Drafter,
    policy: Policy,
    acceptance: str | Rule = "auto",
    draft_session: Session | None = None,
) -> Engine:
    return Engine(target, drafter, policy, Sampler, acceptance, draft_session)


def run(loop_engine: Engine, rows: Iterable[Row], max_batch_size: int = 8) -> Iterator[Round]:
    return Scheduler(loop_engine, max_batch_size).run(rows)
