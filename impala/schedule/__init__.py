"""Schedule of a run: which tasks are played and which algorithms learn, and when."""
