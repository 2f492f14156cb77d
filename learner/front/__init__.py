"""The learner's interface to actors: server, admission, accounts."""
