"""Part III: attention in TileLang and Triton.

Importing a kernel decides how Triton runs it (`runtime.environment.prepare`).
"""

from nsa_tutorial.runtime import environment

environment.prepare()
