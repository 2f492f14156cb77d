"""What actors and learner share. Importing this package imports nothing."""
