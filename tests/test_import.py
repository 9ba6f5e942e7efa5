"""What importing the package brings in: nothing that is not needed yet."""

import subprocess
import sys

HEAVY = ("numba", "jax", "torch", "rich", "array_api_strict", "ml_dtypes", "autograd", "matplotlib")


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_imports_no_heavy_library() -> None:
    loaded = _run(f"import sys, optimisers; print([name for name in {HEAVY} if name in sys.modules])")
    assert loaded == "[]"


def test_importing_the_package_beyond_numpy_is_a_matter_of_few_modules() -> None:
    code = "import sys, numpy; before = set(sys.modules); import optimisers; print(len(set(sys.modules) - before))"
    assert int(_run(code)) < 150


def test_a_backend_is_imported_when_its_arrays_are_first_met() -> None:
    code = """
import sys, numpy as np, optimisers as op
model = {"w": np.ones(2, np.float32), "h": np.ones(2, np.float16)}
with op.reference_only():
    state, model = op.update(op.setup(op.Adam(), model), model, model)
op.partition(state, model), op.destructure(model), op.global_norm(model), op.trainables(model), str(state)
state.freeze("w").thaw().adjust(lr=0.5)
print([name for name in ("numba", "jax", "torch", "rich") if name in sys.modules])
state, model = op.update(op.setup(op.Adam(), model), model, model)
print([name for name in ("numba", "jax", "torch", "rich") if name in sys.modules])
"""
    assert _run(code).splitlines() == ["[]", "['numba']"]


def test_without_numba_numpy_runs_the_step() -> None:
    code = """
import sys, importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "numba" else find(name, *rest)
import numpy as np, optimisers as op
model = {"w": np.ones(2, np.float32)}
state, model = op.update_(op.setup(op.Descent(0.5), model), model, {"w": np.ones(2, np.float32)})
print("numba" in sys.modules, model["w"].tolist())
"""
    assert _run(code) == "False [0.5, 0.5]"


def test_bfloat16_parameters_need_no_import_of_the_users_own() -> None:
    code = """
import numpy as np, optimisers as op
state = op.setup(op.Adam(), {"w": np.ones(2)}, state_dtype="bfloat16")
print(state["w"].slots["mu"].dtype)
"""
    assert _run(code) == "bfloat16"
