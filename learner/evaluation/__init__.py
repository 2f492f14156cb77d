"""Snapshots for evaluators, their reports, the best agent and milestones."""
