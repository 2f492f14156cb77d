"""Checks of what messages mean: mistakes that neither shapes nor ranges show; no TensorFlow."""
