"""A fleet that is broken survives, and no unroll is lost or counted twice."""

import contextlib
import pathlib
import time

import pytest
from chaos import soak


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_fleet_survives_minutes_of_faults(tmp_path: pathlib.Path) -> None:
    for line in soak.soak(2.0, seed=1, directory=tmp_path):
        print(line)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_fleet_survives_a_partition_of_three_minutes(tmp_path: pathlib.Path) -> None:
    """One witness is on the learner's side: learning goes on with what it sends."""
    with contextlib.ExitStack() as stack:
        fleet = soak.Fleet(tmp_path, stack)
        fleet.wait_until_it_goes_on(0.0)
        fleet.wait_for_everyone()
        fleet.proxy.partition()
        time.sleep(180.0)  # longer than every limit on silence
        fleet.proxy.heal()
        fleet.wait_until_it_goes_on(fleet.saved_frames())
        fleet.wait_for_everyone()
        fleet.end()
    for line in soak.account(fleet):
        print(line)
