"""V-trace: value targets and advantages from experience of an older policy."""

from vtrace.vtrace import VTraceReturns, from_importance_weights

__all__ = ["VTraceReturns", "from_importance_weights"]
