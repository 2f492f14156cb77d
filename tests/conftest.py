"""What holds for every test: repeatable examples, and a TensorFlow that is quiet and modest."""

import os

import hypothesis
import pytest

# Before TensorFlow is imported, and inherited by the processes that tests start.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

# No time limit for an example: the first one pays for tracing and compilation.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

# Helpers whose assertions should say what they saw, as those of tests do.
pytest.register_assert_rewrite("scripted")
