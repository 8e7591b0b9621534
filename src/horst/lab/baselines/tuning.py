"""What each contender is, and how it is tuned: one line, formula, source, two settings, and six tries of them.

Every contender gets the same number of tries, a grid over its two most important settings, for two small tasks: the
byte-level GPT of ``horst run table6 --scale cpu`` (``language``) and the vision transformer on digits of ``horst run
table1 --scale cpu`` (``vision``). Settings are fields of :class:`~horst.lab.baselines.contenders.Optimization`.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Literal

from horst.lab.baselines.contenders import Name

Task = Literal["language", "vision"]
Grid = dict[str, tuple[Any, ...]]
TRIES = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """A contender in words and in tries.

    Args:
        about: One line.
        formula: The step in plain letters: theta the weight, g its gradient, u Adam's step at rate lr.
        source: Where it comes from.
        language: Values of the two settings for the byte-level GPT.
        vision: Values of the same settings for the vision transformer on digits.
    """

    about: str
    formula: str
    source: str
    language: Grid
    vision: Grid

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the two most important settings.

        Example:
            >>> CONTENDERS["horst"].settings
            ('lr', 'alpha')
        """
        return tuple(name for name, values in self.language.items() if len(values) > 1)

    def tries(self, task: Task) -> list[dict[str, Any]]:
        """The settings of each try, for ``dataclasses.replace(optimization, **settings)``.

        Example:
            >>> CONTENDERS["horst"].tries("language")[0]
            {'lr': 0.002, 'alpha': 5.0, 'mirror': 'all'}
        """
        grid = {"language": self.language, "vision": self.vision}[task]
        return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


_LR: Grid = {"lr": (2e-3, 4e-3, 8e-3)}
_VISION_LR: Grid = {"lr": (3e-3, 1e-2, 3e-2)}
_ALPHA: Grid = {"alpha": (5.0, 20.0)}
# Settings with one value are what the guides recommend, and not tuned.
_HORST: Grid = {"alpha": (5.0, "auto"), "mirror": ("all",)}
_HORST_L1: Grid = {"alpha": ("auto",), "mirror": ("all",)}
_BLOCKS: Grid = {"mirror": ("blocks",)}  # where AdamW has its l1
# Of the tries of horst-muon, this alpha is the better one on text; with it a learning rate of 8e-3 broke.
_MUON_L1: Grid = {"alpha": (20.0,)}

CONTENDERS: dict[Name, Contender] = {
    "adamw": Contender(
        about="AdamW",
        formula="theta - u - lr weight_decay theta",
        source="Loshchilov and Hutter 2019",
        language={**_LR, "weight_decay": (0.1, 0.3)},
        vision={**_VISION_LR, "weight_decay": (0.1, 0.5)},
    ),
    "horst": Contender(
        about="HORST: AdamW, then an entropy-mirror step along the same direction",
        formula="theta_half = AdamW; theta_half exp(-alpha sign(theta_half) u)",
        source="the paper, Algorithm 2",
        language={**_LR, **_HORST},
        vision={**_VISION_LR, **_HORST},
    ),
    "horst-l1": Contender(
        about="HORST and a soft threshold of the matrices in the blocks",
        formula="soft(HORST's theta, lr l1)",
        source="this library",
        language={"lr": (4e-3, 8e-3), "l1": (0.02, 0.05, 0.1), **_HORST_L1},
        vision={"lr": (3e-3, 1e-2), "l1": (0.01, 0.03, 0.1), **_HORST_L1},
    ),
    "horst-muon": Contender(
        about="Muon in the blocks and AdamW elsewhere, each with the mirror step",
        formula="theta_half = Muon; theta_half exp(-alpha sign(theta_half) u)",
        source="the paper, Section 4",
        language={**_LR, **_ALPHA},
        vision={**_VISION_LR, **_ALPHA},
    ),
    "horst-muon-l1": Contender(
        about="Muon in the blocks and AdamW elsewhere, each with the mirror step, and a soft threshold of the blocks",
        formula="soft(HORST-Muon's theta, lr l1)",
        source="this library",
        language={"lr": (2e-3, 4e-3), "l1": (0.02, 0.05, 0.1), **_MUON_L1},
        vision={"lr": (1e-3, 3e-3), "l1": (0.01, 0.03, 0.1), **_MUON_L1},
    ),
    "hyperbolic": Contender(
        about="The exact mirror step of the hyperbolic entropy along Adam's direction",
        formula="sinh(arcsinh(alpha theta) - alpha u) / alpha",
        source="the paper, Example 3.10",
        language={**_LR, **_ALPHA},
        vision={**_VISION_LR, **_ALPHA},
    ),
    "ham": Contender(
        about="HAM: Adam's step, then a mirror step with the sign after the half step",
        formula="theta_half = theta - u; theta_half exp(-ham_alpha lr sign(theta_half) g)",
        source="Jacobs et al. 2025",
        language={**_LR, "ham_alpha": (20.0, 200.0)},
        vision={**_VISION_LR, "ham_alpha": (20.0, 200.0)},
    ),
    "muon": Contender(
        about="Muon in the blocks, AdamW elsewhere",
        formula="theta - lr U V^T of the momentum, scaled to the size of AdamW's step",
        source="Jordan et al. 2024; torch.optim.Muon",
        language={**_LR, "muon_lr_ratio": (1.0, 2.0)},
        vision={**_VISION_LR, "muon_lr_ratio": (1.0, 2.0)},
    ),
    "muon-l1": Contender(
        about="Muon in the blocks, with a soft threshold, and AdamW elsewhere",
        formula="soft(Muon's theta, lr l1)",
        source="this library",
        language={"lr": (4e-3, 8e-3), "l1": (0.02, 0.05, 0.1)},
        vision={"lr": (1e-3, 3e-3), "l1": (0.01, 0.03, 0.1)},
    ),
    "muon-l1-horst": Contender(
        about="Muon in the blocks, with a soft threshold, and HORST elsewhere",
        formula="soft(Muon's theta, lr l1)",
        source="this library",
        language={"lr": (4e-3, 8e-3), "l1": (0.02, 0.05, 0.1), **_HORST_L1},
        vision={"lr": (1e-3, 3e-3), "l1": (0.01, 0.03, 0.1), **_HORST_L1},
    ),
    "scion": Contender(
        about="Scion: steps towards the corner of a spectral ball, of a sign ball outside the blocks",
        formula="(1 - matrix_lr) theta - matrix_lr scion_radius sqrt(out / in) U V^T of the momentum",
        source="Pethick et al. 2025, arXiv 2502.07529",
        language={"matrix_lr": (2.0**-12, 2.0**-11, 2.0**-10), "scion_radius": (25.0, 50.0)},
        vision={"matrix_lr": (2.0**-12, 2.0**-11, 2.0**-10), "scion_radius": (25.0, 50.0)},
    ),
    "adamw-penalty": Contender(
        about="AdamW with an L1 penalty in the gradient",
        formula="g + penalty sign(theta) in place of g",
        source="textbook",
        language={"lr": (2e-3, 8e-3), "penalty": (1e-5, 3e-5, 1e-4), **_BLOCKS},
        vision={"lr": (3e-3, 1e-2), "penalty": (1e-5, 1e-4, 1e-3), **_BLOCKS},
    ),
    "adamw-l1": Contender(
        about="AdamW and a soft threshold: proximal AdamW",
        formula="soft(AdamW's theta, lr l1)",
        source="proximal gradient descent, decoupled as weight decay is",
        language={"lr": (4e-3, 8e-3), "l1": (0.02, 0.05, 0.1), **_BLOCKS},
        vision={"lr": (3e-3, 1e-2), "l1": (0.01, 0.03, 0.1), **_BLOCKS},
    ),
    "spred": Contender(
        about="spred: block weights as products of two factors with decay, which is an L1 penalty",
        formula="theta = f1 f2; Adam on each factor; f - lr spred_decay f",
        source="Ziyin and Wang 2023",
        language={"lr": (8e-3, 1.6e-2), "spred_decay": (0.03, 0.1, 0.5)},
        vision={"lr": (3e-3, 1e-2), "spred_decay": (0.1, 0.5, 2.0)},
    ),
    "dwf": Contender(
        about="Deep weight factorisation: products of dwf_depth factors with decay, an L_{2/D} penalty",
        formula="theta = f1 ... fD; Adam on each factor; f - lr spred_decay f; factors drawn truncated",
        source="Kolb et al. 2025, arXiv 2502.02496",
        language={"lr": (8e-3, 1.6e-2, 3.2e-2), "spred_decay": (0.1, 0.5)},
        vision={"lr": (3e-3, 1e-2, 3e-2), "spred_decay": (0.1, 0.5)},
    ),
    "pilot": Contender(
        about="PILoT: block weights as m w with m^2 - w^2 = 1 and a decay that changes, from L2 to L1",
        formula="min L(m w) + a_k sum(m^2 + w^2); a_k falls, or rises while |m w|_1 is above a target",
        source="Jacobs and Burkholz 2024, arXiv 2408.09966",
        language={"lr": (4e-3, 8e-3, 1.6e-2), "pilot_strength": (1.0, 4.0)},
        vision={**_VISION_LR, "pilot_strength": (0.3, 1.0)},
    ),
    "sign-in": Contender(
        about="Sign-In: block weights as m w, reset to m^2 - w^2 = 1 now and then so that signs can flip",
        formula="theta = m w; Adam on both; every sign_in_every steps m^2 = (1 + sqrt(1 + 4 theta^2)) / 2",
        source="Gadhikar et al. 2025, arXiv 2504.12801",
        language={"lr": (4e-3, 8e-3, 1.6e-2), "sign_in_every": (20, 100)},
        vision={**_VISION_LR, "sign_in_every": (50, 200)},
    ),
    "madam": Contender(
        about="MADAM: multiplicative steps along the normalised gradient; no sign changes",
        formula="clip(theta exp(-matrix_lr sign(theta) clip(g / sqrt(v), 10)), madam_bound rms(theta_0))",
        source="Bernstein et al. 2020",
        language={"matrix_lr": (0.03, 0.1, 0.3), "madam_bound": (10.0, 30.0)},
        vision={"matrix_lr": (0.03, 0.1, 0.3), "madam_bound": (10.0, 30.0)},
    ),
    "lmd": Contender(
        about="LMD without its noise: exponentiated gradient on two positive parts, sign of the momentum",
        formula="theta = a - b; a exp(-matrix_lr (sign(m_a) + weight_decay)), b alike with -g",
        source="arXiv 2506.17768; its public core, written from the abstract",
        language={"matrix_lr": (0.01, 0.03, 0.1), "lmd_gamma": (0.01, 0.03)},
        vision={"matrix_lr": (0.01, 0.03, 0.1), "lmd_gamma": (0.01, 0.03)},
    ),
    "linbreg": Contender(
        about="LinBreg: gradient steps on a dual variable, soft-thresholded; starts sparse, grows to a target",
        formula="v - matrix_lr g; theta = soft(v, lambda); lambda exp(rate (target - zeros))",
        source="Bungert et al. 2022",
        language={"matrix_lr": (0.3, 1.0, 3.0), "bregman_density": (0.1, 0.3)},
        vision={"matrix_lr": (0.3, 1.0, 3.0), "bregman_density": (0.1, 0.3)},
    ),
    "adabreg": Contender(
        about="AdaBreg: LinBreg along Adam's direction",
        formula="v - u; theta = soft(v, lambda); lambda exp(rate (target - zeros))",
        source="Bungert et al. 2022",
        language={"lr": (4e-3, 8e-3, 1.6e-2), "bregman_density": (0.1, 0.3)},
        vision={**_VISION_LR, "bregman_density": (0.1, 0.3)},
    ),
    "cast": Contender(
        about="CAST: AdamS, Adam whose first moment draws weights outside a mask to zero, and its masks",
        formula="mu = (1 - t/T) m + (t/T) pull sign(theta) outside a magnitude mask; theta - lr mu / sqrt(v)",
        source="Huang et al. 2025, arXiv 2509.25996",
        language={**_LR, "weight_decay": (0.1, 0.3)},
        vision={**_VISION_LR, "weight_decay": (0.1, 0.5)},
    ),
    "pat": Contender(
        about="PAT of torchao, if that is installed: AdamW and a proximal map of a latent copy",
        formula="theta = soft(latent AdamW weight, l1 times the sum of the learning rates)",
        source="torchao.prototype.pat",
        language={"lr": (4e-3, 8e-3), "l1": (0.001, 0.003, 0.01)},
        vision={"lr": (3e-3, 1e-2), "l1": (0.001, 0.003, 0.01)},
    ),
}
