"""IMPALA as a service: train agents, and act with what they learned or are learning.

    import impala

    impala.train("catch", "runs/catch")
    policy = impala.load("runs/catch")
    session = impala.connect("learner-host:50051").session()

Names are imported when first used: importing this package alone imports nothing else.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import vtrace as vtrace
    from actors.connection import RunFinished as RunFinished
    from actors.external import Client as Client
    from actors.external import Session as Session
    from actors.external import connect as connect
    from actors.session import LearnerError as LearnerError
    from impala.analysis.learning_curve import Curve as Curve
    from impala.commands.library import Trained as Trained
    from impala.commands.library import TrainingError as TrainingError
    from impala.commands.library import curve as curve
    from impala.commands.library import evaluate as evaluate
    from impala.commands.library import load as load
    from impala.commands.library import preset as preset
    from impala.commands.library import train as train
    from impala.config.presets import PRESETS as PRESETS
    from impala.config.schema import ActorConfig as ActorConfig
    from impala.config.schema import ActorCriticConfig as ActorCriticConfig
    from impala.config.schema import AgentConfig as AgentConfig
    from impala.config.schema import AtariConfig as AtariConfig
    from impala.config.schema import ChecksConfig as ChecksConfig
    from impala.config.schema import CloneConfig as CloneConfig
    from impala.config.schema import Config as Config
    from impala.config.schema import CriticConfig as CriticConfig
    from impala.config.schema import DemonstrationsConfig as DemonstrationsConfig
    from impala.config.schema import EnvironmentConfig as EnvironmentConfig
    from impala.config.schema import EpsilonConfig as EpsilonConfig
    from impala.config.schema import EvaluatorConfig as EvaluatorConfig
    from impala.config.schema import ImpactConfig as ImpactConfig
    from impala.config.schema import ImpalaConfig as ImpalaConfig
    from impala.config.schema import LearnerConfig as LearnerConfig
    from impala.config.schema import LimitsConfig as LimitsConfig
    from impala.config.schema import MixConfig as MixConfig
    from impala.config.schema import ObjectiveConfig as ObjectiveConfig
    from impala.config.schema import OptimiserConfig as OptimiserConfig
    from impala.config.schema import PolicyGradientConfig as PolicyGradientConfig
    from impala.config.schema import QLearningConfig as QLearningConfig
    from impala.config.schema import QuarantineConfig as QuarantineConfig
    from impala.config.schema import RepeatConfig as RepeatConfig
    from impala.config.schema import ReplayConfig as ReplayConfig
    from impala.config.schema import SacConfig as SacConfig
    from impala.config.schema import TasksConfig as TasksConfig
    from impala.config.schema import TeacherConfig as TeacherConfig
    from impala.config.schema import TelemetryConfig as TelemetryConfig
    from impala.environments.base import Environment as Environment
    from impala.play.policy import Policy as Policy

    __version__: str

_SCHEMA = "impala.config.schema"  # every class of it whose name ends in Config is exported
_PLACES = {
    **dict.fromkeys(
        ("Trained", "TrainingError", "curve", "evaluate", "load", "preset", "train"),
        "impala.commands.library",
    ),
    **dict.fromkeys(("Client", "Session", "connect"), "actors.external"),
    "LearnerError": "actors.session",
    "RunFinished": "actors.connection",
    "Environment": "impala.environments.base",
    "Curve": "impala.analysis.learning_curve",
    "PRESETS": "impala.config.presets",
    "Policy": "impala.play.policy",
}


def __getattr__(name: str) -> Any:
    if name == "vtrace":
        return importlib.import_module("vtrace")
    if name == "__version__":
        return importlib.import_module("impala.runtime.installation").VERSION
    if name in _PLACES or name.endswith("Config"):
        return getattr(importlib.import_module(_PLACES.get(name, _SCHEMA)), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    configs = [name for name in dir(importlib.import_module(_SCHEMA)) if name.endswith("Config")]
    return sorted([*globals(), *_PLACES, *configs, "vtrace", "__version__"])
