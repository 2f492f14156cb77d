"""Conformance suites: the contracts of environments, torsos and algorithms as tests.

Subclass a suite in a test module, under a name that begins with Test, and define how your part is
made; pytest then runs the suite's tests on it. Suites are separate modules, so that the one of
environments loads no TensorFlow:

    from impala.testing.environments import EnvironmentConformance

    class TestMyGame(EnvironmentConformance):
        def make(self, num_envs):
            return MyGame(num_envs)
"""
