"""Plays trained agents: policies, evaluation, videos and exported models."""
