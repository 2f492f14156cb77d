"""Actors: unroll the behaviour policy in vectorised environments and stream it to the learner."""
