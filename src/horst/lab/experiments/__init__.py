"""One module a table or figure of the paper: a frozen Config, ``run(config) -> Result``, and a command line.

``python -m horst.lab.experiments.figure5_additive_vs_multiplicative --help`` lists the fields of a config.
"""
