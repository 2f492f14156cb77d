"""What actors meet: the server, admission, accounts."""
