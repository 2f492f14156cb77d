"""Parts for impala from another package."""
