"""The models of the experiments: GPT-2, DeiT and diagonal linear networks."""
