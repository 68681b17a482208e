import pytest

from topology.readers.visible_devices import visible_gpus

UUIDS = [(0, "GPU-aaaa1111"), (1, "GPU-aaaa2222"), (2, "GPU-bbbb3333"), (3, None)]
MIG = {"MIG-1": 1, "MIG-2": 1, "MIG-3": 2}


@pytest.mark.parametrize(
    ("value", "order"),
    [
        ("0,1,2,3", (0, 1, 2, 3)),
        ("3, 1", (3, 1)),
        ("GPU-bbbb3333,0", (2, 0)),
        ("GPU-b", (2,)),  # the beginning of a UUID is enough
        ("GPU-aaaa", ()),  # unless two begin so
        ("MIG-3,MIG-1,MIG-2", (2, 1)),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("1,-1,2", (1,)),  # CUDA stops at the first entry it cannot use
        ("1,9,2", (1,)),
        ("1,1", ()),
        ("\u0663", ()),  # an Arabic three is no index
    ],
)
def test_cuda_rules(value, order):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}, UUIDS, MIG).order == order


def test_not_set_is_not_empty():
    assert visible_gpus({}, UUIDS, MIG).order is None


def test_entries_that_name_nothing_are_told():
    assert "9" in visible_gpus({"CUDA_VISIBLE_DEVICES": "1,9"}, UUIDS, MIG).problem
    assert "twice" in visible_gpus({"CUDA_VISIBLE_DEVICES": "1,1"}, UUIDS, MIG).problem
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}, UUIDS, MIG).problem == ""
