"""cct: credit transport for language-model reinforcement learning.

Evidence tells success, transport carries it back along the tokens, geometry turns it into a policy
change. Importing this package, or any component's knobs, does not import torch: recipes validate in
a fraction of a second. Tensor mathematics lives in the `functional` modules and the `nn` towers.
"""

__version__ = "0.1.0"
