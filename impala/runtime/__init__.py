"""Processes: signals, supervision, listening, credentials, metrics."""
