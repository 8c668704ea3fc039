"""The names of the verification modes."""

MODES = ("auto", "serial", "parallel", "hybrid")
