"""The arithmetic: arrays of odd kinds, threads, compiled code and where it is kept."""

import math
import os
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import pytest

import optimisers as op
from optimisers.backends import array_api, elementwise, loops
from optimisers.backends import numba as compiled
from optimisers.backends.arrays import dtype_name, library_of, memory_of
from optimisers.backends.namespace import namespace
from tests.conftest import EPS, NUMPY_BACKENDS, Backend, all_bits, assert_close, leaf, random_array, train, wide

# Arrays of odd kinds --------------------------------------------------------------------------------------------------


class Labelled(np.ndarray):
    """A subclass that carries something beside its numbers."""


def _misaligned(values: np.ndarray) -> np.ndarray:
    buffer = np.zeros(values.nbytes + 1, np.uint8)
    array = np.frombuffer(buffer.data, values.dtype, values.size, offset=1).reshape(values.shape)
    array[...] = values
    assert not array.flags.aligned
    return array


def _strided(values: np.ndarray) -> np.ndarray:
    whole = np.zeros([2 * size for size in values.shape], values.dtype)
    array = whole[tuple(slice(None, None, 2) for _ in values.shape)]
    array[...] = values
    return array


def _mapped(values: np.ndarray) -> np.ndarray:
    with tempfile.TemporaryFile() as file:
        array = np.memmap(file, values.dtype, shape=values.shape)
    array[...] = values
    return array


def _read_only(values: np.ndarray) -> np.ndarray:
    array = values.copy()
    array.flags.writeable = False
    return array


KINDS: dict[str, Any] = {
    "plain": np.copy,
    "Fortran": np.asfortranarray,
    "strided": _strided,
    "reversed": lambda values: np.flip(np.flip(values).copy()),
    "transposed": lambda values: np.ascontiguousarray(values.T).T,
    "byte-swapped": lambda values: values.astype(values.dtype.newbyteorder()),
    "misaligned": _misaligned,
    "mapped": _mapped,
    "subclass": lambda values: values.copy().view(Labelled),
    "read-only": _read_only,
    "read-only Fortran": lambda values: _read_only(np.asfortranarray(values)),
    "masked": lambda values: np.ma.masked_array(values.copy()),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "complex128"])
def test_arrays_of_every_kind_train_alike(numpy_backend: Backend, name: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    make = KINDS[name]
    start, *gradients = (random_array(rng, (4, 6), dtype) for _ in range(4))
    rule = op.Chain(op.ClipGlobalNorm(2.0), op.AdamW(0.1))
    expected, right = train(rule, {"w": start, "v": start[0].copy()}, *[{"w": g, "v": g[0].copy()} for g in gradients])
    for in_place in (False, True):
        model = {"w": make(start), "v": start[0].copy()}
        w = model["w"]
        state, new = train(rule, model, *[{"w": make(g), "v": g[0].copy()} for g in gradients], in_place=in_place)
        assert np.asarray(new["w"]).astype(dtype).tobytes() == right["w"].tobytes()
        assert state == expected
        assert dtype_name(new["w"]) == dtype
        if in_place and w.flags.writeable:
            assert new["w"] is w
        else:
            assert np.asarray(w).astype(dtype).tobytes() == start.tobytes()
            assert new["w"].flags.writeable


def test_a_mapped_file_is_written_in_place(numpy_backend: Backend, tmp_path: FilePath) -> None:
    w = np.memmap(tmp_path / "w.bin", np.float64, "w+", shape=(5,))
    op.update_(op.setup(op.Descent(0.5), [w]), [w], [np.ones(5)])
    w.flush()
    assert np.fromfile(tmp_path / "w.bin").tolist() == [-0.5] * 5


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (0, 3), (1, 1, 1), (2, 1), (1, 5), (16_385,), (3, 11_000)], ids=str)
def test_arrays_of_every_shape(backend: Backend, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    start, first, second = (random_array(rng, shape, "float64") for _ in range(3))
    rule = op.Chain(op.SkipNonFinite(), op.ClipNorm(2.0), op.Adam(0.1), op.WeightDecay(0.01))
    beside = {"beside": backend.array([1.0])}
    for in_place in (False, True):
        model = {"w": backend.make(start), **beside}
        grads = [{"w": backend.make(g), **beside} for g in (first, second)]
        state, new = train(rule, model, *grads, in_place=in_place)
        assert tuple(new["w"].shape) == shape
        assert {tuple(slot.shape) for slot in leaf(state, "w").slots.values()} == {shape}
        expected, mu, nu = start, np.zeros(shape), np.zeros(shape)
        for step, g in enumerate((first, second), 1):
            g = g * (2.0 / max(2.0, float(np.linalg.norm(g))))
            mu, nu = 0.9 * mu + 0.1 * g, 0.999 * nu + 0.001 * g * g
            d = 0.1 * (mu / (1 - 0.9**step)) / (np.sqrt(nu / (1 - 0.999**step)) + 1e-8)
            expected = expected - (d + 0.01 * expected)
        assert_close(backend.read(new["w"]), expected, 1e-13)


def test_a_model_of_arrays_without_elements_alone(backend: Backend) -> None:
    model = [backend.array(np.zeros((0, 3))), backend.array(np.zeros(0), "float32")]
    for rule in (op.Adam(), op.Chain(op.SkipNonFinite(), op.ClipGlobalNorm(1.0), op.ClipNorm(1.0), op.Momentum())):
        state, new = train(rule, model, model)
        assert state.step == 1
        assert [tuple(array.shape) for array in new] == [(0, 3), (0,)]


def test_a_mix_of_kinds_dtypes_and_libraries_in_one_model() -> None:
    import array_api_strict
    import torch

    model = {
        "float32": np.ones(3, np.float32),
        "float16": np.ones(3, np.float16),
        "complex": np.ones(3, np.complex64),
        "strided": np.ones(6)[::2],
        "torch": torch.ones(3),
        "strict": array_api_strict.ones(3),
    }
    rule = op.Chain(op.ClipGlobalNorm(1.0), op.Momentum(1.0))
    grads = {name: array * 3 for name, array in model.items()}
    norm = op.global_norm(grads, op.setup(rule, model))
    assert norm == pytest.approx(math.sqrt(6 * 27))
    for step in (op.update, op.update_):
        _, new = step(op.setup(rule, model), model, grads)
        for name, array in new.items():
            assert type(array) is type(model[name])
            assert_close(np.asarray(array), np.full(3, 1 - 3 / norm), 1e-3 if name == "float16" else 1e-6)


# Large arrays and threads ---------------------------------------------------------------------------------------------

LARGE = 500_000


def _large(rule: op.Rule, in_place: bool) -> tuple[op.State, dict[str, Any]]:
    rng = np.random.default_rng(0)
    model = {"big": rng.normal(size=LARGE).astype(np.float32), "small": rng.normal(size=(7, 3)).astype(np.float32)}
    grads = [{name: rng.normal(size=array.shape).astype(np.float32) for name, array in model.items()} for _ in range(2)]
    return train(rule, model, *grads, in_place=in_place)


def test_arrays_above_the_threshold_of_threads_equal_the_reference() -> None:
    assert LARGE > compiled._PARALLEL_FROM
    rule = op.Chain(op.ClipGlobalNorm(1.0), op.AdamW(0.1))
    found = [_large(rule, in_place) for in_place in (False, True)]
    with op.reference_only():
        state, model = _large(rule, False)
    for mine, own in found:
        for name, array in model.items():
            assert_close(own[name], array, 8 * EPS["float32"])
        assert_close(leaf(mine, "big").slots["mu"], leaf(state, "big").slots["mu"], EPS["float32"])
    assert all_bits(NUMPY_BACKENDS[0], *found[0]) == all_bits(NUMPY_BACKENDS[0], *found[1])


@pytest.fixture
def eager_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share even the smallest step among threads."""
    monkeypatch.setattr(compiled, "_PARALLEL_FROM", 0)
    monkeypatch.setattr("numba.config.NUMBA_NUM_THREADS", 4)
    monkeypatch.setattr(compiled, "_pool", None)


@pytest.mark.usefixtures("eager_threads")
def test_a_step_gives_the_same_bits_whatever_the_threads_do() -> None:
    rng = np.random.default_rng(0)
    rule = op.Chain(op.SkipNonFinite(), op.ClipNorm(2.0), op.Adam(0.1), op.WeightDecay(0.01))
    model = [rng.normal(size=int(size)) for size in rng.integers(0, 40_000, 20)]
    grads = [rng.normal(size=array.shape) for array in model]

    def bits() -> list[bytes]:
        state, new = train(rule, model, grads, grads)
        return [array.tobytes() for array in new] + [slot.tobytes() for each in state.leaves() for slot in each.slots.values()]

    shared = [bits() for _ in range(5)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("numba.config.NUMBA_NUM_THREADS", 1)
        alone = bits()
    assert all(each == alone for each in shared)


@pytest.mark.usefixtures("eager_threads")
def test_models_may_train_in_several_threads_at_once() -> None:
    rule = op.Chain(op.ClipGlobalNorm(5.0), op.AdamW(0.1))
    rng = np.random.default_rng(0)
    starts = [{"w": rng.normal(size=30_000), "b": rng.normal(size=5)} for _ in range(4)]
    results: dict[int, Any] = {}
    failures: list[BaseException] = []
    gate = threading.Barrier(len(starts))

    def work(at: int) -> None:
        try:
            gate.wait()
            model = {name: array.copy() for name, array in starts[at].items()}
            state = op.setup(rule, model)
            for step in range(20):
                state, model = op.update_(state, model, {name: np.sin(array + step) for name, array in model.items()})
            results[at] = model
        except BaseException as error:  # noqa: BLE001  # shown below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(len(starts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for at, start in enumerate(starts):
        model = {name: array.copy() for name, array in start.items()}
        state = op.setup(rule, model)
        for step in range(20):
            state, model = op.update_(state, model, {name: np.sin(array + step) for name, array in model.items()})
        for name, array in model.items():
            assert results[at][name].tobytes() == array.tobytes()


def test_threads_that_meet_a_new_layout_together_do_not_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    op.update(op.setup(op.Momentum(0.1), {"w": np.ones(2)}), {"w": np.ones(2)}, {"w": np.ones(2)})
    before = sys.getswitchinterval()
    failures: list[BaseException] = []

    def work(gate: threading.Barrier, size: int) -> None:
        try:
            model = {str(at): np.ones(size) for at in range(10)}
            state = op.setup(op.Momentum(0.1), model)
            gate.wait()
            for _ in range(2):
                state, model = op.update_(state, model, {str(at): np.ones(size) for at in range(10)})
        except BaseException as error:  # noqa: BLE001  # shown below
            failures.append(error)

    try:
        sys.setswitchinterval(1e-6)
        for size in range(100):
            gate = threading.Barrier(2)
            threads = [threading.Thread(target=work, args=(gate, size + 3)) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(before)
    assert failures == []


@pytest.mark.usefixtures("eager_threads")
def test_a_child_process_makes_threads_of_its_own() -> None:
    model = {"w": np.zeros(50_000)}
    state = op.setup(op.Descent(1.0), model)
    one = {"w": np.ones(50_000)}
    op.update(state, model, one)
    assert compiled._pool is not None
    read, write = os.pipe()
    # What the warning is about, threads that a fork does not copy, is what is tested.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", RuntimeWarning)  # JAX says the same
        child = os.fork()
    if child == 0:  # pragma: no cover
        _, new = op.update(state, model, one)
        os.write(write, b"right" if (new["w"] == -1).all() else b"wrong")
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert answer.read() == "right"
    os.waitpid(child, 0)


# What a step costs ----------------------------------------------------------------------------------------------------


def test_plans_are_kept_for_each_set_of_gradients_and_not_without_end() -> None:
    from optimisers.plan import _PLANS

    model = {str(at): np.ones(1) for at in range(10)}
    state = op.setup(op.Descent(0.1), model)
    for at in range(10):
        op.update(state, model, {str(at): np.ones(1)})
    assert len(state.layout.cache["plans"]) == 10
    for first in range(10):
        for second in range(first):
            op.update(state, model, {str(first): np.ones(1), str(second): np.ones(1)})
    assert len(state.layout.cache["plans"]) <= _PLANS


def test_addresses_of_slots_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = {str(at): np.ones(3) for at in range(20)}
    state = op.setup(op.Adam(), model)
    state, model = op.update_(state, model, model)
    reads: list[int] = []
    read = compiled._Expected.read
    monkeypatch.setattr(
        compiled._Expected,
        "read",
        lambda self, arrays, *rest, **options: (reads.append(len(arrays)), read(self, arrays, *rest, **options))[1],
    )
    for _ in range(3):
        state, model = op.update_(state, model, {name: np.ones(3) for name in model})
    # The gradients and the parameters, once each a step.
    assert reads == [20, 20] * 3


def test_the_layout_and_the_plan_stay_the_same_from_step_to_step(backend: Backend) -> None:
    model = {"a": backend.array([1.0]), "b": backend.array([1.0])}
    one = {"a": backend.array([1.0]), "b": backend.array([1.0])}
    state, model = train(op.Adam(op.schedules.Cosine(0.1, 10)), model, one)
    layout = state.layout
    plans = dict(layout.cache["plans"])
    for _ in range(5):
        state, model = op.update_(state, model, one)
    assert state.layout is layout
    assert layout.cache["plans"] == plans


def test_nothing_of_the_models_size_is_allocated_by_a_step_in_place() -> None:
    import tracemalloc

    model = {str(at): np.ones(100_000, np.float32) for at in range(4)}
    grads = {name: np.ones(100_000, np.float32) for name in model}
    state = op.setup(op.AdamW(), model)
    state, model = op.update_(state, model, grads)
    tracemalloc.start()
    try:
        state, model = op.update_(state, model, grads)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.05 * 4 * 400_000


def test_blocks_of_the_reference_stay_small() -> None:
    seen: list[int] = []

    @op.rule
    class Watching(op.Rule):
        def kernel(xp: Any, g: Any, p: Any, h: Any) -> Any:
            seen.append(g.size)
            return g

    with op.reference_only():
        state = op.setup(Watching(), {"w": np.zeros(100_000, np.float32)})
        seen.clear()
        _, model = train(state, {"w": np.zeros(100_000, np.float32)}, {"w": np.ones(100_000, np.float32)})
    assert max(seen) == array_api._BLOCK
    assert sum(seen) == 100_000
    assert (model["w"] == -1).all()


# Compiled code on disk ------------------------------------------------------------------------------------------------

SCRIPT = """
import numpy as np, optimisers as op
from optimisers.backends import loops
made = []
compile_at_once = loops.compile_at_once
loops.compile_at_once = lambda *rest, **options: made.append(compile_at_once(*rest, **options)) or made[-1]
model = {"w": np.ones(3)}
state, model = op.update_(op.setup(op.ClipGlobalNorm(1.0), model), model, {"w": np.array([4.0, 0.0, 0.0])})
loops = [each.stats for each in made if each.py_func.__name__.startswith("loop_")]
print(*(sum(sum(getattr(each, f"cache_{what}").values()) for each in loops) for what in ("misses", "hits")))
print(model["w"].tolist())
"""
RIGHT = "[0.0, 1.0, 1.0]"


def _process(folder: FilePath, script: str = SCRIPT) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OPTIMISERS_CACHE_DIR": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_second_process_loads_what_the_first_compiled(tmp_path: FilePath) -> None:
    assert _process(tmp_path) == ["2 0", RIGHT]
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "kernels").rglob("*") if path.is_file()}
    assert len([path for path in files if path.suffix == ".py"]) == 2
    assert _process(tmp_path) == ["0 2", RIGHT]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "kernels").rglob("*") if path.is_file()} == files
    # What is no longer what was kept is made anew.
    for path in (tmp_path / "kernels").glob("*.py"):
        path.write_text("raise SystemExit('not what was kept')")
    assert _process(tmp_path)[1] == RIGHT


def test_a_place_that_cannot_be_written_only_costs_time(tmp_path: FilePath) -> None:
    file = tmp_path / "taken"
    file.write_text("x")
    assert _process(file)[-1] == RIGHT
    assert file.read_text() == "x"


def test_another_order_of_scalars_is_another_function_on_disk_too(tmp_path: FilePath) -> None:
    script = """
import numpy as np, optimisers as op
@op.rule
class Scaled(op.Rule):
    def scalars(self, step):
        return {order}
    def kernel(xp, g, p, h):
        return h.a * g + h.b
model = [np.zeros(1)]
print(op.update(op.setup(Scaled(), model), model, [np.ones(1)])[1][0].item())
"""
    assert _process(tmp_path, script.replace("{order}", "{'a': 2.0, 'b': 0.0}")) == ["-2.0"]
    assert _process(tmp_path, script.replace("{order}", "{'b': 0.0, 'a': 3.0}")) == ["-3.0"]


def _function(source: str, **names: Any) -> Any:
    scope = dict(names)
    exec(source, scope)
    return scope["kernel"]


PLAIN = "def kernel(xp, g, p, h):\n    return g * K\n"
INNER = "def kernel(xp, g, p, h):\n    def inner(x):\n        return x * K\n    return inner(g)\n"
DEFAULT = "def kernel(xp, g, p, h, k=K):\n    return g * k\n"
KEYWORD = "def kernel(xp, g, p, h, *, k=K):\n    return g * k\n"
MODULE = "def kernel(xp, g, p, h):\n    return g * config.K\n"


def _module(**names: Any) -> types.ModuleType:
    module = types.ModuleType("config")
    vars(module).update(names)
    return module


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (_function(PLAIN, K=2.0), _function(PLAIN, K=3.0)),
        (_function(PLAIN, K=2.0), _function(PLAIN, K=2)),
        (_function(PLAIN, K=2.0), _function(PLAIN.replace("*", "+"), K=2.0)),
        (_function(INNER, K=2.0), _function(INNER, K=3.0)),
        (_function(DEFAULT, K=2.0), _function(DEFAULT, K=3.0)),
        (_function(KEYWORD, K=2.0), _function(KEYWORD, K=3.0)),
        (_function(MODULE, config=_module(K=2.0)), _function(MODULE, config=_module(K=3.0))),
        (_function(PLAIN.replace("K", "K(g)"), K=lambda x: x), _function(PLAIN.replace("K", "K(g)"), K=lambda x: x + x)),
    ],
    ids=["global", "type", "code", "inner", "default", "keyword", "module", "helper"],
)
def test_a_kernel_is_known_by_all_that_its_code_depends_on(first: Any, second: Any) -> None:
    marks = [loops._fingerprint(each) for each in (first, second)]
    # Where it cannot be told what code depends on, it is not kept.
    assert marks[0] != marks[1] or marks == [None, None]
    assert loops._fingerprint(first) == marks[0]


@pytest.mark.parametrize("value", [np.ones(2), [1, 2], {"a": 1}, object()])
def test_a_kernel_that_depends_on_what_may_change_is_not_kept(value: Any) -> None:
    assert loops._fingerprint(_function(PLAIN, K=value)) is None


def test_the_source_of_a_loop_is_written_whole_or_not_at_all(tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTIMISERS_CACHE_DIR", str(tmp_path / "new"))
    for source in ("first", "second", "second"):
        path = loops._keep(source, "loop")
        assert path is not None
        assert path.read_text() == source
        assert [each.name for each in path.parent.iterdir()] == ["loop.py"]
    monkeypatch.setenv("OPTIMISERS_CACHE_DIR", str(path))
    assert loops._keep("third", "loop") is None
    assert path.read_text() == "second"


def test_code_without_a_file_is_compiled_and_not_kept() -> None:
    scope: dict[str, Any] = {}
    exec("def double(x):\n    return x + x\n", scope)
    assert loops.compile_at_once(scope["double"], "float64(float64)")(1.5) == 3.0


def test_a_recursive_helper_has_a_fingerprint() -> None:
    scope: dict[str, Any] = {}
    exec("def helper(x):\n    return helper(x - 1) if x > 0 else x\ndef kernel(xp, g, p, h):\n    return helper(g)\n", scope)
    assert loops._fingerprint(scope["kernel"]) is not None
    assert loops._fingerprint(math.sqrt) is not None


def test_a_kernel_that_cannot_be_kept_is_compiled_all_the_same() -> None:
    table = np.array([2.0, 3.0])

    @op.rule
    class Looking(op.Rule):
        def scalars(self, step: Any) -> dict[str, Any]:
            return {"one": 1.0}

        def kernel(xp: Any, g: Any, p: Any, h: Any) -> Any:
            return g * table[1]

    _, model = train(Looking(), [np.zeros(2)], [np.ones(2)])
    assert model[0].tolist() == [-3.0, -3.0]


# The functions that kernels call --------------------------------------------------------------------------------------

REALS = np.array([-2.5, -1.0, -0.0, 0.0, 0.5, 1.0, 3.0, np.inf, -np.inf, np.nan])
COMPLEX = np.array([3 + 4j, -3 + 4j, 0j, -1j, 1 + 0j, -2 + 0j, complex(np.nan, 1), complex(1, np.inf)])
ONE = {
    "abs": np.abs,
    "abs2": lambda x: np.real(x) * np.real(x) + np.imag(x) * np.imag(x),
    "conj": np.conj,
    "exp": np.exp,
    "imag": np.imag,
    "isfinite": np.isfinite,
    "log": np.log,
    "real": np.real,
    "sign": np.sign,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
}


def _bodies(name: str) -> tuple[Any, Any]:
    """The bodies of a function, before compilation: for real and for complex numbers."""
    function = getattr(elementwise, name)
    dispatch = dict(zip(function.py_func.__code__.co_freevars, function.py_func.__closure__, strict=True))["dispatch"].cell_contents
    return function.py_func, dispatch


def _where_defined(name: str) -> np.ndarray:
    return REALS[REALS > 0] if name == "log" else REALS[REALS >= 0] if name == "sqrt" else REALS


@pytest.mark.parametrize("name", ONE)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_functions_of_one_real_number_are_numpys(name: str, dtype: str) -> None:
    function = getattr(elementwise, name)
    with np.errstate(all="ignore"):
        for x in _where_defined(name).astype(dtype):
            expected = ONE[name](x)
            for found in (function(x), *([] if name in ("exp",) and x > 100 else [_plain(function.py_func, x)])):
                np.testing.assert_allclose(found, expected, rtol=4 * EPS[dtype])


def _plain(body: Any, x: Any) -> Any:
    return body(x.item())


@pytest.mark.parametrize("name", ONE)
def test_functions_of_one_complex_number_are_numpys(name: str) -> None:
    function, dtype = getattr(elementwise, name), "complex128"
    values = COMPLEX if name in ("abs2", "conj", "imag", "isfinite", "real") else COMPLEX[:6]
    with np.errstate(all="ignore"):
        for x in values[np.abs(values) > 0 if name == "log" else slice(None)].astype(dtype):
            np.testing.assert_allclose(function(x), ONE[name](x), rtol=8 * EPS[dtype], atol=EPS[dtype])


PAIRS = [(x, y) for x in (-1.5, 0.0, 2.0, np.nan, np.inf) for y in (-2.0, 0.5, 7.0)]


@pytest.mark.parametrize("compiled_too", [False, True], ids=["plain", "compiled"])
def test_functions_of_several_numbers_are_numpys(compiled_too: bool) -> None:
    def body(name: str) -> Any:
        function = getattr(elementwise, name)
        return function if compiled_too else function.py_func

    for x, y in PAIRS:
        np.testing.assert_equal(body("minimum")(x, y), np.minimum(x, y))
        np.testing.assert_equal(body("maximum")(x, y), np.maximum(x, y))
        np.testing.assert_equal(body("where")(x > y, x, y), np.where(x > y, x, y).item())
    for x in (-1.5, 0.0, 0.25, 2.0, np.inf, np.nan):
        np.testing.assert_equal(elementwise.clip(x, -0.5, 0.5), np.clip(x, -0.5, 0.5))
    for z in (3 + 0.25j, -3 - 4j, 0.1 + 0.2j):
        expected = complex(np.clip(z.real, -0.5, 0.5), np.clip(z.imag, -0.5, 0.5))
        assert elementwise.clip(z, -0.5, 0.5) == expected


def test_the_bodies_before_compilation_are_those_of_the_compiled_code() -> None:
    for x in (-3.0, 0.25, math.inf):
        assert elementwise.clip.py_func(x, -1.0, 1.0) == elementwise.clip(x, -1.0, 1.0)
    assert elementwise._complex_sign(3 + 4j) == 0.6 + 0.8j
    assert elementwise._complex_sign(0j) == 0j
    assert elementwise.abs_.py_func(3 + 4j) == 5.0
    assert elementwise._clip(3.0, -1.0, 1.0) == 1.0


def test_every_function_is_there_on_whole_arrays_too(backend: Backend) -> None:
    library = namespace(_namespace(backend), "float64")
    x, z = backend.array([-2.0, 0.0, 0.5]), backend.array([3 + 4j, 0j], "complex128")
    for name in elementwise.__all__:
        assert callable(getattr(library, name))
    for name in ("abs", "abs2", "conj", "exp", "imag", "isfinite", "real", "sign", "tanh"):
        for values in (x, z):
            with np.errstate(all="ignore"):
                np.testing.assert_allclose(
                    backend.read(getattr(library, name)(values)), ONE[name](backend.read(values)), rtol=1e-14
                )
    assert backend.read(library.clip(x, -1.0, 0.25)).tolist() == [-1.0, 0.0, 0.25]
    assert backend.read(library.clip(z, -1.0, 3.5)).tolist() == [3 + 3.5j, 0j]
    assert backend.read(library.maximum(x, 0.25)).tolist() == [0.25, 0.25, 0.5]
    assert backend.read(library.minimum(0.25, x)).tolist() == [-2.0, 0.0, 0.25]
    assert backend.read(library.where(x > 0, x, 7.0)).tolist() == [7.0, 7.0, 0.5]
    assert backend.read(library.where(True, 1.0, x)).tolist() == [1.0, 1.0, 1.0]
    assert backend.read(library.where(False, 1.0, 2.0)).tolist() == 2.0


def _namespace(backend: Backend) -> Any:
    from optimisers.backends.arrays import namespace_of

    array = backend.array([1.0])
    return np if isinstance(array, np.ndarray) else namespace_of(array)


# What can be asked of arrays ------------------------------------------------------------------------------------------


def test_what_is_an_array_and_of_which_library() -> None:
    import array_api_strict
    import torch

    assert library_of(np.ones(2)) == library_of(np.ones(2).view(Labelled)) == "numpy"
    assert library_of(torch.ones(2)) == library_of(torch.nn.Parameter(torch.ones(2))) == "torch"
    assert library_of(array_api_strict.ones(2)) == "array_api_strict"
    for other in (1.0, np.float32(1), "x", None, [1.0], len, np, object()):
        assert library_of(other) is None


def test_where_an_array_lies(sharing_backend: Backend) -> None:
    array = sharing_backend.array(np.zeros((3, 4)), "float32")
    name = library_of(array) or ""
    whole, part = memory_of(array, name), memory_of(array[1:, ::2], name)
    assert whole is not None
    assert part is not None
    assert (whole.shape, whole.strides, whole.itemsize) == ((3, 4), (16, 4), 4)
    assert part.address - whole.address == 16
    assert part.strides == (16, 8)
    assert whole.bounds == (whole.address, whole.address + 48)
    assert memory_of(array, "other") is None


def test_arrays_are_read_without_asking_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled._can_read()
    for answer in (True, False):
        monkeypatch.setattr(compiled, "_can_read", lambda answer=answer: answer)
        _, model = train(op.Adam(0.1), {"w": np.ones(3)}, {"w": np.ones(3)}, {"w": np.ones(3)}, in_place=True)
        assert_close(model["w"], [0.8] * 3, 1e-7)


@pytest.fixture
def _fresh_check() -> Iterator[None]:
    compiled._can_read.cache_clear()
    yield
    compiled._can_read.cache_clear()


@pytest.mark.usefixtures("_fresh_check")
def test_an_interpreter_with_other_objects_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fields:
        def __mul__(self, count: int) -> "Fields":
            return self

        def from_address(self, address: int) -> list[int]:
            return [0] * 9

    monkeypatch.setattr(compiled.ctypes, "c_int64", Fields())
    assert not compiled._can_read()


def test_large_and_small_numbers_keep_their_meaning(numpy_backend: Backend) -> None:
    values = np.array([np.nan, np.inf, -np.inf, 1e308, 5e-324, 0.0])
    _, model = train(op.Chain(op.ClipGrad(1.0), op.Descent(1.0)), [np.zeros(6)], [values])
    assert np.isnan(model[0][0])
    assert model[0][1:].tolist() == [-1.0, 1.0, -1.0, -5e-324, 0.0]
    state, model = train(op.Adam(0.1), [np.zeros(3)], [np.array([np.nan, 1.0, np.inf])])
    assert np.isnan(model[0][0])
    assert_close(model[0][1], -0.1, 1e-7)
    assert np.isnan(wide(leaf(state, 0).slots["mu"])[0])


# What a kernel may do, and where it may come from ----------------------------------------------------------------------


@op.rule
class _Previous(op.Rule):
    """A rule that keeps an old slot in a new one."""

    lr: op.Hyper = 0.1

    slots = {"last": op.LIKE, "before": op.LIKE}

    def scalars(self, step: Any) -> dict[str, Any]:
        return {"lr": self.lr}

    def kernel(xp: Any, g: Any, p: Any, h: Any, last: Any, before: Any) -> Any:
        return h.lr * g, g, last


def test_a_slot_may_become_another(backend: Backend) -> None:
    for step in (op.update, op.update_):
        model = {"w": backend.array([1.0, 1.0])}
        state = op.setup(_Previous(), model)
        for value in (1.0, 2.0, 3.0):
            state, model = step(state, model, {"w": backend.array([value, value])})
        found = {name: backend.read(slot).tolist() for name, slot in leaf(state, "w").slots.items()}
        assert found == {"last": [3.0, 3.0], "before": [2.0, 2.0]}


def test_machine_code_does_not_ask_for_the_module_of_its_kernel(tmp_path: FilePath) -> None:
    rules = """
import optimisers as op

@op.rule
class Mine(op.Rule):
    lr: op.Hyper = 0.1
    def scalars(self, step):
        return {"lr": self.lr}
    def kernel(xp, g, p, h):
        return h.lr * xp.tanh(g)
"""
    train = """
import importlib, sys
import numpy as np
import optimisers as op
model = {"w": np.ones(3)}
op.update(op.setup(importlib.import_module(sys.argv[1]).Mine(), model), model, model)
print("trained")
"""
    (tmp_path / "first.py").write_text(rules)
    (tmp_path / "train.py").write_text(train)
    environment = os.environ | {"OPTIMISERS_CACHE_DIR": str(tmp_path / "cache")}
    for name in ("first", "second"):
        done = subprocess.run(
            [sys.executable, "train.py", name], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.stdout == "trained\n", done.stderr
        if name == "first":
            (tmp_path / "first.py").rename(tmp_path / "second.py")


def test_a_step_is_not_recorded_by_torch() -> None:
    import torch

    model = {"w": torch.ones(3, requires_grad=True)}
    state = op.setup(op.ScheduleFree(0.1), model)
    for _ in range(3):
        (model["w"] ** 2).sum().backward()
        state, model = op.update_(state, model, {"w": model["w"].grad})
        assert (model["w"].is_leaf, model["w"].requires_grad) == (True, True)
        assert not any(slot.requires_grad for slot in leaf(state, "w").slots.values())
    assert leaf(state, "w").step == 3
