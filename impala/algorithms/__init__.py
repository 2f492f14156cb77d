"""What is learned: an algorithm is the loss of a batch, and which variables it moves."""

from impala.algorithms.base import Algorithm, LossOutput
from impala.algorithms.impala import Impala

__all__ = ["Algorithm", "Impala", "LossOutput"]
