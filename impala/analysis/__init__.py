"""Reads the rows of runs: curves and measures of continual learning."""
