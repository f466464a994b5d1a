"""The header of TileLang's C, compiled once: g++ takes three quarters of a second to read it, and
the kernel itself a quarter.

The compiled form lies among TileLang's own files. g++ takes the header's text wherever that form
does not fit, after an update of the compiler, say.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from tilelang.contrib.cc import get_cplus_compiler
from tilelang.env import TILELANG_TEMPLATE_PATH, env

HEADER = "#include <tl_templates/cpp/common.h>\n"


@functools.cache
def flags(*options: str) -> list[str]:
    """What has g++ take the compiled header; `options` are the others that a kernel is compiled
    with. None where it cannot be had: TileLang cuts its flags at spaces, so no path may have one,
    and other compilers have ways of their own."""
    compiler = get_cplus_compiler() or ""
    command = [compiler, "-std=c++17", "-fPIC", *options, "-I" + TILELANG_TEMPLATE_PATH]
    key = hashlib.sha256(repr(command).encode()).hexdigest()[:16]
    header = Path(env.TILELANG_CACHE_DIR).absolute() / f"header-{key}" / "common.h"
    if Path(compiler).name != "g++" or any(c.isspace() for c in str(header)):
        return []
    compiled = Path(f"{header}.gch")
    try:
        if not compiled.exists():
            header.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=header.parent) as room:
                text, made = Path(room, "common.h"), Path(room, "common.h.gch")
                text.write_text(HEADER)
                command += ["-x", "c++-header", str(text), "-o", str(made)]
                subprocess.run(command, check=True, capture_output=True)
                os.replace(text, header)  # whole, also where several processes make them
                os.replace(made, compiled)
    except (OSError, subprocess.CalledProcessError):
        return []
    return ["-include", str(header)]
