"""Checks of what messages mean: violations that neither shapes nor ranges show; no TensorFlow."""
