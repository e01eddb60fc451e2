"""A checkout without symbolic links builds no wheel: it would hold the three files of `tripletune/` alone."""

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.errors import SetupError

# The modules of a whole checkout are several hundred; without the links there are three.
FEWEST_MODULES = 100


class WholeBuild(build_py):
    """`build_py` that counts the modules first."""

    def run(self) -> None:
        """Build, unless modules are missing; an editable install copies none, so it is not checked."""
        if not self.editable_mode and (count := len(self.find_all_modules())) < FEWEST_MODULES:
            raise SetupError(
                f"{count} modules of at least {FEWEST_MODULES}: the links in tripletune/ are missing; run `git config "
                "core.symlinks true && git checkout -- tripletune`, then build again"
            )
        super().run()


setup(cmdclass={"build_py": WholeBuild})
