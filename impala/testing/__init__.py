"""Conformance suites: what environments, torsos, distributions and algorithms promise, as tests.

Subclass a suite in a test module, under a name that begins with Test, and say how your part is
made; pytest then runs the suite's tests on it. Suites are modules of their own, so that the one of
environments loads no TensorFlow:

    from impala.testing.environments import EnvironmentConformance

    class TestMyGame(EnvironmentConformance):
        def make(self, num_envs):
            return MyGame(num_envs)
"""
