"""The simulation of clusters agrees with arithmetic where no node dies, and loses nothing where some die."""

from __future__ import annotations

import sys
from dataclasses import replace

import cluster_simulation
import pytest
import terminal
from cluster_simulation import Cluster, Simulation

pytestmark = pytest.mark.slow

SMALL = Cluster(speed=100.0, start=0.0, block=0.0, noticed=15.0, between_deaths=0.0, batch=4)
BLOCKS = [[10, 20, 30, 40]] * 60


def test_without_overhead_a_job_takes_its_tokens_divided_by_the_total_speed() -> None:
    assert Simulation(SMALL, 1, BLOCKS).run().seconds == pytest.approx(60.0)
    assert Simulation(SMALL, 4, BLOCKS).run().seconds == pytest.approx(15.0, rel=0.05)
    late = Simulation(replace(SMALL, start=20.0), 4, BLOCKS).run().seconds
    assert late == pytest.approx(20 + Simulation(SMALL, 4, BLOCKS).run().seconds)


def test_a_block_does_not_end_before_its_longest_request() -> None:
    assert Simulation(SMALL, 1, [[1, 1, 1, 100]]).run().seconds == pytest.approx(4.0)


def test_the_driver_limits_the_speed_of_many_nodes() -> None:
    slow = replace(SMALL, block=0.5)
    for nodes in (2, 10, 50):
        result = Simulation(slow, nodes, BLOCKS).run()
        assert result.driver == pytest.approx(30.0) and result.seconds >= 30.0
    assert result.seconds == pytest.approx(30.0, rel=0.1)  # 50 nodes, and no faster than the driver


def test_no_token_is_lost_when_nodes_die() -> None:
    frail = replace(SMALL, between_deaths=40.0, start=5.0)
    result = Simulation(frail, 4, BLOCKS, seed=1).run()
    whole = Simulation(replace(SMALL, start=5.0), 4, BLOCKS).run()
    assert result.deaths > 0 and result.repeated > 0 and whole.seconds < result.seconds < 10 * whole.seconds
    assert result.tokens == whole.tokens == 6000
    assert Simulation(frail, 4, BLOCKS, seed=1).run() == result  # the seed decides the result


def test_the_command_prints_a_line_per_number_of_nodes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--nodes", "1", "--nodes", "20", "--requests-per-node", "40", "--hours-between-failures", "0"]
    monkeypatch.setattr(sys, "argv", ["cluster_simulation.py", *options])
    with pytest.raises(SystemExit) as ended:
        terminal.run(cluster_simulation.main)
    out = capsys.readouterr().out
    assert not ended.value.code and "40 requests a node" in out and "0 of 100" in out
    monkeypatch.setattr(sys, "argv", ["cluster_simulation.py", "--requests-per-node", "3"])
    with pytest.raises(SystemExit) as ended:
        terminal.run(cluster_simulation.main)
    assert ended.value.code == 2 and "--requests-per-node 3; allowed: at least --batch, 8" in capsys.readouterr().out
