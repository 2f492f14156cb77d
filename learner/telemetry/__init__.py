"""Telemetry: makes rows of numbers about a run and writes them to sinks."""
