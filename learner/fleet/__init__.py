"""What the learner knows of its callers: accounts, roster, receipts, quarantine."""
