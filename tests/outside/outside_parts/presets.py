"""A preset that uses the other parts."""

import dataclasses

from impala.config.parts import compose
from impala.config.presets import PRESETS
from impala.config.schema import AgentConfig, MixConfig, ReplayConfig
from outside_parts.algorithms import Impact
from outside_parts.torsos import Gated

OUTSIDE_CATCH = (
    "Catch with IMPACT and a gated torso.",
    compose(
        dataclasses.replace(
            PRESETS["catch"][1],
            agent=AgentConfig(torso="outside_parts.torsos:Gated"),
            algorithm="outside_parts.algorithms:Impact",
            mix=MixConfig(fresh=16, replayed=16),
            replay=ReplayConfig(rule="fifo", capacity_frames=4_000),
        ),
        gated=Gated.Settings(width=32),
        impact=Impact.Settings(clip=0.25),
    ),
)
