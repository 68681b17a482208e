"""One GPU off the NVLink fabric: the answer leaves it out when that is faster, and says so."""

import json
from pathlib import Path

import pytest

from planner.cli import main
from planner.search.gpu_counts import with_or_without_off_fabric
from topology.errors import Infeasible


def matrix(gpus: int, lost: int) -> str:
    """`nvidia-smi topo -m` of an NVSwitch node in which one GPU fell off the fabric (vllm-project/vllm#16336)."""
    names = [f"GPU{i}" for i in range(gpus)]
    lines = ["\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity"]
    for i in range(gpus):
        cells = [" X " if i == j else "SYS" if lost in {i, j} else "NV18" for j in range(gpus)]
        lines.append(f"GPU{i}\t" + "\t".join(cells) + "\t0-95\t0")
    return "\n".join(lines) + "\n"


@pytest.fixture
def broken(tmp_path):
    path = tmp_path / "topo.txt"
    path.write_text(matrix(4, lost=2))
    return str(path)


def ask(capsys, *flags: str) -> dict:
    assert main(["suggest", "--json", "--top", "1", "--gpu", "b200-sxm", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_placement_uses_sound_gpus_when_they_suffice(broken, capsys) -> None:
    """Two GPUs of the three good ones, whatever the index of the lost one."""
    answer = ask(capsys, "--cluster", broken, "--gpus", "2", "--pp", "1")
    placement = answer["plans"][0]["plan"]["placement"]

    assert len(placement) == 2
    assert 2 not in placement


def step_s(answer: dict) -> float:
    return answer["plans"][0]["estimate"]["step_s"]["value"]


def test_the_answer_is_the_faster_of_with_and_without(broken, capsys) -> None:
    """No GPU count given: at least as fast as all four, and as the most that do without GPU 2."""
    question = ("--cluster", broken, "--model", "llama3-8b", "--global-batch", "12", "--framework", "any", "--pp", "1")
    free, whole, sound = (
        ask(capsys, *question),
        ask(capsys, *question, "--gpus", "4"),
        ask(capsys, *question, "--gpus", "3"),
    )

    assert step_s(free) == min(step_s(whole), step_s(sound))


def test_leaving_a_gpu_out_is_said(broken, capsys) -> None:
    """Three GPUs divide a batch of 3 and four do not: without GPU 2 the step is faster, and the answer says so."""
    answer = ask(capsys, "--cluster", broken, "--model", "llama3-8b", "--global-batch", "3", "--framework", "any")

    assert 2 not in answer["plans"][0]["plan"]["placement"]
    assert any("GPU 2" in note and "left out" in note for note in answer["assumed"])


def test_neither_with_nor_without_is_infeasible() -> None:
    def nothing(count: int):
        raise Infeasible(f"no plan for {count}")

    with pytest.raises(Infeasible, match="no plan for 8"):
        with_or_without_off_fabric(nothing, gpus=8, off_fabric=(2,))


FAULTS = Path(__file__).parents[1] / "data"


def test_a_tray_with_one_gpu_without_links_is_planned_on_the_others(capsys) -> None:
    """The GB300 fault file: three GPUs on NVLink beat four of which one poisons the communicator."""
    assert main(
        ["suggest", "--json", "--top", "1", "--gpu", "gb300", "--global-batch", "24", "--seq-len", "4096", "--pp", "1",
         "--cluster", str(FAULTS / "nccl_xml" / "gb300_1tray_fault_gpu1_count0.xml")]
    ) == 0  # fmt: skip
    answer = json.loads(capsys.readouterr().out)

    assert sorted(answer["plans"][0]["plan"]["placement"]) == [0, 2, 3]
    assert any("GPU 1" in note and "left out" in note for note in answer["assumed"])


@pytest.mark.parametrize(
    ("matrix_file", "gpu", "bridged"),
    [("47_3x_a6000_one_pair.txt", "rtx-a6000", {0, 1}), ("48_4gpu_nv4_crossed_pairs_phb.txt", "rtx-3090", {0, 3})],
)
def test_two_gpus_of_a_half_bridged_box_are_the_bridged_ones(matrix_file, gpu, bridged, capsys) -> None:
    """Asked for two GPUs, placement takes a bridged pair, whatever their numbers."""
    path = str(FAULTS / "topo" / matrix_file)
    assert main(["suggest", "--json", "--model", "llama3.2-1b", "--seq-len", "2048", "--global-batch", "8",
                 "--cluster", path, "--gpu", gpu, "--gpus", "2", "--top", "1"]) == 0  # fmt: skip
    plan = json.loads(capsys.readouterr().out)["plans"][0]["plan"]

    assert set(plan["placement"]) in ({0, 3}, {1, 2}) if "crossed" in matrix_file else set(plan["placement"]) == bridged
