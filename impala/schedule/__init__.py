"""What is played and learned when: tasks and phases."""
