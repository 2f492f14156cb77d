"""The `impala` command."""
