"""The ledger of learning results: runs experiments, records them, renders pages from records."""
