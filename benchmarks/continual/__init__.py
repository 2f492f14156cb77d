"""The continual-learning experiment with CLEAR: runs its arms over seeds, and reports scores."""
