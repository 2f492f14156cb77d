"""The log directory: checkpoints, rows of telemetry, and their readers."""
