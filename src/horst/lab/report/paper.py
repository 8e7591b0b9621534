"""The paper's own numbers, to set ours beside."""

from __future__ import annotations

# Table 1: validation accuracy in percent, mean and spread, by model, optimizer and sparsity.
TABLE1: dict[str, dict[str, dict[float, tuple[float, float]]]] = {
    "DeiT-base": {
        "adamw": {0.7: (76.15, 0.71), 0.8: (74.18, 0.29), 0.9: (68.86, 2.05)},
        "horst": {0.7: (78.89, 0.79), 0.8: (78.63, 1.26), 0.9: (76.83, 0.92)},
    },
    "DeiT-small": {
        "adamw": {0.7: (71.59, 1.12), 0.8: (67.07, 0.31), 0.9: (59.64, 1.52)},
        "horst": {0.7: (78.42, 0.39), 0.8: (75.83, 0.47), 0.9: (69.41, 2.75)},  # beta 1e-2 at 80 and 90 %
    },
}
# Table 3: DeiT-small at 90 %, seed 1.
TABLE3 = {"adamw": 59.23, "ham": 60.06, "horst": 70.5}
# Table 4: DeiT-small at 70 %, 600 epochs.
TABLE4 = {"adamw": 73.76, "horst": 78.96}
# Table 6: validation perplexity of GPT-2 small by optimizer and sparsity.
TABLE6: dict[str, dict[float, float]] = {
    "adamw": {0.0: 23.46, 0.1: 23.61, 0.2: 24.54, 0.3: 33.49, 0.4: 86.50, 0.5: 237.17},
    "ham": {0.0: 23.48, 0.1: 23.60, 0.2: 24.31, 0.3: 29.58, 0.4: 54.58, 0.5: 105.76},
    "horst": {0.0: 23.61, 0.1: 23.70, 0.2: 24.32, 0.3: 28.78, 0.4: 44.16, 0.5: 69.58},
}
