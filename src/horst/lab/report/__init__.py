"""Tables and figures from result files. Reads results, runs nothing."""
