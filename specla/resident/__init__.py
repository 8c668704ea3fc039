"""The round that never leaves a GPU."""
