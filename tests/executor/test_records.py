"""Records on disk survive a kill; deadlines and middles are what they say."""

import pytest

from executor.launch.records import Deadline, Recorder, median_and_spread, nonfinite_as_none, read_records


def test_a_line_cut_short_ends_the_records(tmp_path) -> None:
    path = tmp_path / "r"
    recorder = Recorder(path)
    recorder.write("missing", what="a")
    recorder.write("missing", what="b")
    recorder.close()
    path.write_text(path.read_text()[:-5])

    assert [record["what"] for record in read_records(path)] == ["a"]
    assert list(read_records(tmp_path / "absent")) == []


def test_a_rate_that_is_no_number_is_never_written(tmp_path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        Recorder(tmp_path / "r").write("flows", rate=float("nan"))


def test_a_difference_may_be_infinite_and_is_then_none() -> None:
    assert nonfinite_as_none({"a": float("inf"), "b": float("nan"), "c": 1.5, "d": "inf"}) == {
        "a": None,
        "b": None,
        "c": 1.5,
        "d": "inf",
    }


def test_middle() -> None:
    mid, spread = median_and_spread([float(value) for value in range(1, 21)])

    assert mid == 10.5
    assert spread == pytest.approx((18 - 3) / 10.5)
    assert median_and_spread([2.0]) == (2.0, 0.0)


def test_deadline() -> None:
    assert Deadline(100).allows(50)
    assert not Deadline(0).allows(0)
