"""Checks manifests against Kubernetes' schemas and against the program, without a cluster.

`python -m deploy.lint [DIRECTORY ...]` renders the overlays under deploy/overlays, or the given
directories, and prints complaints. Each check is a function from the rendered objects to a list of
complaints; `checks.py` lists them. TensorFlow is never loaded: the learner's metrics are read from
its source.
"""
