"""A preset that uses the other parts."""

import dataclasses

from impala.config.presets import PRESETS
from impala.config.schema import AgentConfig, MixConfig, ReplayConfig
from impala.parts.sections import compose
from outside_parts.algorithms import Awr
from outside_parts.torsos import Gated

OUTSIDE_CATCH = (
    "Catch with advantage-weighted regression and a gated torso.",
    compose(
        dataclasses.replace(
            PRESETS["catch"][1],
            agent=AgentConfig(torso="outside_parts.torsos:Gated"),
            algorithm="outside_parts.algorithms:Awr",
            mix=MixConfig(fresh=16, replayed=16),
            replay=ReplayConfig(rule="fifo", capacity_frames=4_000),
        ),
        awr=Awr.Settings(temperature=0.25),
        gated=Gated.Settings(width=32),
    ),
)
