"""From numbers to rows: what is written down about a run."""
