"""Sweeps: many runs with different settings, scheduled by Ray Tune; `impala sweep` starts one."""
