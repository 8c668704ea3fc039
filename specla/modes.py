"""Names of the verification modes, apart from the ops so that the command line need not load torch."""

MODES = ("auto", "serial", "parallel", "hybrid")
AUTO = "hybrid"  # what "auto" stands for in plain torch; for kernels, ops/triton/tuning chooses
