"""Tables and figures of the frontier studies, which go beyond the paper."""
