"""Makes the attention of vLLM's GLM-5.3-Flash importable without its package.

The package also has the model's encoder of images, which imports torchvision.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import vllm

package = ModuleType("vllm.models.glm5next")
package.__path__ = [str(Path(vllm.__file__).parent / "models" / "glm5next")]
sys.modules.setdefault(package.__name__, package)
attention = importlib.import_module(f"{package.__name__}.common.attention")
