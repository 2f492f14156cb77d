"""Version 1 of the protocol: learner.proto and the stubs that protoc makes of it."""
