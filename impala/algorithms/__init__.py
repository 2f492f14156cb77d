"""What is learned: an algorithm is the loss of a batch, and which variables it moves."""
