"""The learner's gRPC service: calls, terms of a fleet, parameters, acting for others."""
