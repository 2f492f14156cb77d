"""Process infrastructure: signals, supervision, listening, credentials, metrics, logs."""
