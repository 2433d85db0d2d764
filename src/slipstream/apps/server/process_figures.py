"""Figures of the server's own process: what grows where something leaks."""

from __future__ import annotations

import asyncio
import threading

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector


def add_process_figures(registry: CollectorRegistry) -> None:
    """Memory, processor time and open files under Prometheus' own names; tasks of the event loop, and threads.

    The registry is read on the event loop.
    """
    ProcessCollector(registry=registry)
    for name, text, count in (
        ("slipstream:tasks", "tasks of the event loop", lambda: len(asyncio.all_tasks())),
        ("slipstream:threads", "threads of the process that Python knows", threading.active_count),
    ):
        Gauge(name, text, registry=registry).set_function(count)
