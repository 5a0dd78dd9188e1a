"""Compiles the native kernels into a wheel if LONGTAIL_WHEEL_KERNELS=1; see pyproject.toml.

Other wheels are pure: `longtail.model.kernels.native` compiles the kernels at their first use.
"""

import importlib.util
import os
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SHIPS = os.environ.get("LONGTAIL_WHEEL_KERNELS") == "1"
KERNELS = Path("longtail/model/kernels")


class BuildKernels(build_py):
    """Adds the compiled kernels to the package."""

    def run(self):
        """Build the package."""
        super().run()
        if SHIPS and not self.editable_mode:
            place = Path(__file__).parent / "src" / KERNELS / "build.py"
            spec = importlib.util.spec_from_file_location("kernel_library", place)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            for library in module.ship("cc", Path(self.build_lib) / KERNELS / "shipped"):
                print(f"compiled {library}")


class PlatformDistribution(Distribution):
    """Is of one platform if it has compiled kernels."""

    def has_ext_modules(self):
        """Return whether there are compiled kernels."""
        return SHIPS


class PlatformWheel(bdist_wheel):
    """Names the platform of compiled kernels, which serve every Python."""

    def get_tag(self):
        """Return the tags of the wheel."""
        return ("py3", "none", super().get_tag()[2]) if SHIPS else super().get_tag()


setup(
    distclass=PlatformDistribution,
    cmdclass={"build_py": BuildKernels, "bdist_wheel": PlatformWheel},
)
