"""The log directory: checkpoints, rows of telemetry, and what reads them."""
