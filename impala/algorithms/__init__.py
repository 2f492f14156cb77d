"""Algorithms: the loss of a batch, and the variables that it trains."""
