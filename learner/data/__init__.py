"""From a message to a batch: ingest, mix, replay."""
