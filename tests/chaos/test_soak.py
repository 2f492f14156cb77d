"""A fleet that is broken for two minutes survives, and no unroll is lost or counted twice. Slow."""

import pathlib

import pytest
from chaos import soak


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_fleet_survives(tmp_path: pathlib.Path) -> None:
    for line in soak.soak(minutes=2.0, seed=1, directory=tmp_path):
        print(line)
