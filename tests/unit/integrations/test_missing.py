"""Without its library an integration says which extra has it; the package needs none of them."""

import importlib
import subprocess
import sys

import pytest

from ray_lowcomm.core.errors import ModelError

LIBRARIES = ("transformers", "accelerate", "peft", "lightning")


@pytest.mark.parametrize(
    ("module", "library", "extra"),
    [("transformers", "transformers", "hf"), ("lightning", "lightning.pytorch", "lightning")],
)
def test_a_missing_library_is_one_line(module, library, extra, monkeypatch):
    name = f"ray_lowcomm.integrations.{module}"
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ModelError, match=rf"^LowCommCallback needs {module}: pip install 'ray_lowcomm\[{extra}\]' .*$"):
        importlib.import_module(name)


def test_the_package_loads_none_of_them():
    code = f"""
import sys
import ray_lowcomm.integrations.data
from ray_lowcomm import LowCommTrainer
print([name for name in {LIBRARIES} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
