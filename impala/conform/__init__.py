"""The compliance kit: it puts an actor, or a learner, through the cases of the wire protocol."""
