"""A plugin for SGLang 0.5.23: attention and top-k of its ``dsa`` backend, and scores before Hopper.

SGLang calls :func:`register` through its plugin group ``sglang.srt.plugins``, in each of its
processes. This module imports SGLang only inside that function.
"""

import importlib.util

NAME = "sparsemla"
"""Name of the plugin, which a user lists in ``SGLANG_PLUGINS``."""
VERSION = "0.5.23"
"""The version of SGLang whose methods the plugin replaces."""


def register() -> None:
    """Replace attention and top-k of SGLang's ``dsa`` backend.

    Without ``SGLANG_PLUGINS`` SGLang loads every installed plugin. This one changes SGLang's code,
    so it does nothing unless ``SGLANG_PLUGINS`` contains its name.

    Raises:
        ModuleNotFoundError: SGLang is not installed.
        SystemExit: SGLang is of another version, a function of it has changed, or one could not be
            replaced. SGLang logs any other exception of a plugin and then serves with its own
            kernels.
    """
    if importlib.util.find_spec("sglang") is None:
        raise ModuleNotFoundError("SGLang is not installed", name="sglang")
    import sglang
    from sglang.srt.environ import envs

    if NAME not in (name.strip() for name in envs.SGLANG_PLUGINS.get().split(",")):
        return
    try:
        if sglang.__version__ != VERSION:
            raise RuntimeError(
                f"this plugin replaces methods of SGLang {VERSION}, got {sglang.__version__}"
            )
        from sparsemla.backends.sglang.hooks import install

        install()
    except Exception as error:
        raise SystemExit(
            f"sparsemla: SGLang does not start: {error}; otherwise remove {NAME} from "
            "SGLANG_PLUGINS"
        ) from error
