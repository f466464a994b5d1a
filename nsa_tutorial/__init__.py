"""From dense attention to Native Sparse Attention kernels in TileLang and Triton: the code behind
the notebooks.

Importing the package decides, before triton is first imported, whether its kernels are compiled or
interpreted.
"""

from nsa_tutorial.runtime import environment

environment.prepare()

__version__ = "0.1.0"
