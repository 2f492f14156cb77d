"""Namespace of the proto package `impala`; see protos/impala/v1."""
