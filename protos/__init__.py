"""The wire between actors and the learner: generated stubs and the codec. Imports none of ours."""
