"""The kernels of attention in TileLang and Triton: `language/operator/direction`.

A folder of a language has a folder for each operator, and beside them what these share; `tables` is
what both languages read. A `launch` is what the operators call. No argument is checked in these
folders: `ops` does that.

Importing a kernel decides how Triton runs it (`runtime.environment.prepare`).
"""

from nsa_tutorial.runtime import environment

environment.prepare()
