"""What holds for every test: repeatable examples, and a TensorFlow that is quiet and modest."""

import os

import hypothesis
import pytest

from impala.runtime import process

# Before TensorFlow is imported, and inherited by the processes that tests start.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
# Keras is a third of what importing TensorFlow takes, and nothing here uses it: with this, it looks
# for an older Keras, and goes on without. Examples are run as users do, without this.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
process.prefer_onednn()

# No time limit for an example: the first one pays for tracing and compilation.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

# Helpers whose assertions should say what they saw, as those of tests do.
pytest.register_assert_rewrite("scripted")
