"""Paths and their spelling; patterns."""

import copy
import enum
import pickle
from typing import Any

import pytest

from optimisers.errors import OptimiserError, PathError
from optimisers.model.paths import Path, Pattern

KEYS: list[tuple[Any, str]] = [
    ("weight", "weight"),
    ("größe_1", "größe_1"),
    ("a-b:c", "a-b:c"),
    (0, "0"),
    (17, "17"),
    (-3, "-3"),
    ("0", '"0"'),
    ("-3", '"-3"'),
    ("007", "007"),
    ("1e5", "1e5"),
    ("", '""'),
    ("a.b", '"a.b"'),
    ("a/b", '"a/b"'),
    ("a b", '"a b"'),
    (" ", '" "'),
    ("tab\t", '"tab\t"'),
    ("line\nbreak", '"line\nbreak"'),
    ('say "x"', '"say \\"x\\""'),
    ("back\\slash", '"back\\\\slash"'),
    ("\\", '"\\\\"'),
    ('\\"', '"\\\\\\""'),
    ("*", '"*"'),
    ("**", '"**"'),
    ("what?", '"what?"'),
    ("[x]", '"[x]"'),
    ("[", '"["'),
    (True, "[True]"),
    (None, "[None]"),
    (1.5, "[1.5]"),
    ((0, "a"), "[(0, 'a')]"),
    (("]", "["), "[(']', '[')]"),
    (b"raw", "[b'raw']"),
]


@pytest.mark.parametrize(("key", "spelling"), KEYS, ids=[repr(key) for key, _ in KEYS])
def test_every_key_has_a_spelling_that_reads_back(key: Any, spelling: str) -> None:
    assert str(Path((key,))) == spelling
    for keys in ((key,), ("a", key, "b"), (key, key), (0, key)):
        path = Path(keys)
        back = Path(str(path))
        assert back == path
        assert [type(each) for each in back] == [type(each) for each in path]


def test_no_two_paths_share_a_spelling() -> None:
    pairs = [Path((first, second)) for first, _ in KEYS for second, _ in KEYS] + [Path((first,)) for first, _ in KEYS]
    assert len({str(path) for path in pairs}) == len(pairs)


def test_keys_that_are_strings_of_a_subclass_are_spelled_as_strings() -> None:
    class Mixed(str, enum.Enum):  # noqa: UP042  # its str() differs from its value
        W = "weight"

    class Modern(enum.StrEnum):
        W = "weight"

    class Number(enum.IntEnum):
        ZERO = 0

    assert str(Path((Mixed.W, Modern.W, Number.ZERO))) == "weight.weight.0"


def test_a_path_is_a_tuple_of_keys() -> None:
    path = Path("encoder.0.weight")
    assert path == ("encoder", 0, "weight")
    assert hash(path) == hash(("encoder", 0, "weight"))
    assert repr(path) == "Path('encoder.0.weight')"
    assert eval(repr(path)) == path
    assert Path(path) is path
    assert Path(["a", 0]) == Path("a.0")
    assert Path(3) == (3,)
    assert Path("") == Path() == ()
    assert str(Path()) == ""
    assert path / "x" / 1 == Path("encoder.0.weight.x.1")
    assert path.startswith(("encoder", 0))
    assert path.startswith(())
    assert not path.startswith(("encoder", "0"))
    assert path.below(Path("encoder")) == Path("0.weight")
    assert isinstance(path.below(Path("encoder")), Path)


def test_a_path_pickles_and_copies() -> None:
    path = Path(("a.b", 0, None))
    for made in (pickle.loads(pickle.dumps(path)), copy.deepcopy(path), copy.copy(path)):
        assert made == path
        assert type(made) is Path


@pytest.mark.parametrize(
    "spelling",
    ["a..b", ".a", "a.", ".", '"a', 'a"b"', '"a"b', "[1", "[x y]", "[open('f')]", "a[0]", "a.[", '"\\"', "]", "a]", '"a".'],
)
def test_a_spelling_that_cannot_be_read_is_an_error(spelling: str) -> None:
    with pytest.raises(PathError, match="cannot read the path"):
        Path(spelling)
    with pytest.raises(OptimiserError):
        Pattern(spelling)


@pytest.mark.parametrize("spelling", ["[[1, 2]]", "[{}]", "a.[{1: 2}]", "[{1, 2}]", "[([],)]"])
def test_a_key_that_cannot_be_a_key_is_an_error(spelling: str) -> None:
    with pytest.raises(PathError, match="cannot read the path"):
        Path(spelling)


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("encoder", "encoder.0.weight", True),
        ("encoder.0", "encoder.0.weight", True),
        ("encoder.1", "encoder.0.weight", False),
        ("enc", "encoder.0.weight", False),
        ("", "encoder.0.weight", True),
        ("encoder.*.weight", "encoder.0.weight", True),
        ("encoder.*.weight", "encoder.0.bias", False),
        ("encoder.*", "encoder.0.bias", True),
        ("encoder.*", "encoder", False),
        ("encoder.**", "encoder", True),
        ("*", "", False),
        ("**", "", True),
        ("**", "a.b.c", True),
        ("**.bias", "a.b.bias", True),
        ("**.bias", "bias", True),
        ("**.bias", "bias.more", True),
        ("**.bias", "a.unbias", False),
        ("**.layers.*.w", "model.x.layers.3.w", True),
        ("**.layers.*.w", "model.layers.layers.w", True),
        ("**.layers.*.w", "model.layers.w", False),
        ("a.**.b.**.c", "a.b.c", True),
        ("a.**.b.**.c", "a.x.b.y.z.c", True),
        ("a.**.b.**.c", "a.x.c.y.b", False),
        ("**.**.x", "x", True),
        ("layer?", "layer1", True),
        ("layer?", "layer10", False),
        ("l*r*", "layer10", True),
        ("w*", "weight", True),
        ("W*", "weight", False),
        ("*.0", "a.0", True),
        ("*.0", 'a."0"', False),
        ('*."0"', 'a."0"', True),
        ('*."0"', "a.0", False),
        ("*.?", "a.7", True),
        ('"*"', "a", False),
        ('"*"', '"*"', True),
        ('"*".b', '"*".b', True),
        ('"a.b"', '"a.b".c', True),
        ("a.b", '"a.b"', False),
        ("[(0, 'a')]", "[(0, 'a')].w", True),
        ("*", "[(0, 'a')]", True),
    ],
)
def test_patterns(pattern: str, path: str, matches: bool) -> None:
    assert Pattern(pattern).matches(Path(path)) is matches


def test_a_path_as_a_pattern_has_no_wildcards() -> None:
    assert Pattern(Path(("*",))).matches(Path(("*", "w")))
    assert not Pattern(Path(("*",))).matches(Path(("a",)))


def test_a_pattern_of_many_stars_is_matched_in_good_time() -> None:
    path = Path(["a"] * 300)
    assert not Pattern(".".join(["**.a"] * 100) + ".b").matches(path)
