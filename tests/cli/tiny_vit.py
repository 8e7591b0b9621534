"""The shape of the vision transformer that the tests keep on disk."""

VIT = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 16, "depth": 3, "num_heads": 2}
