"""Checks manifests against Kubernetes' schemas and the program, without a cluster.

`python -m deploy.lint [DIRECTORY ...]` renders the overlays under deploy/overlays, or the
directories that are given, and prints what is wrong with them. Each check is a function from the
rendered objects to a list of complaints; `checks.py` lists them. TensorFlow is never loaded: what
the learner exports is read from its source.
"""
