"""Settings: their schema, the presets, the layers they come from, the rules they obey."""
