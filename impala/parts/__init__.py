"""Parts by name (built in, installed, custom), their settings, and objects made of them."""
