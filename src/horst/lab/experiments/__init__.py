"""One module per table or figure of the paper: a frozen Config and ``run(config) -> Result``, run by ``horst run``."""
