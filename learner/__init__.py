"""The learner service: receives unrolls, updates the agent, publishes its parameters."""
