"""Runs `impala ARGUMENTS` where TensorFlow finds two devices: each of them is this CPU."""

import sys

import tensorflow as tf

from impala.__main__ import main

if __name__ == "__main__":
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], two)
    sys.exit(main())
