"""One GPU off the NVLink fabric: the answer leaves it out when that is faster, and says so."""

import json

import pytest

from planner.around import with_or_without
from planner.cli import main
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
    path.write_text(matrix(8, lost=2))
    return str(path)


def ask(capsys, *flags: str) -> dict:
    assert main(["suggest", "--json", "--top", "1", "--gpu", "b200-sxm", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_placement_uses_sound_gpus_when_they_suffice(broken, capsys) -> None:
    """Four GPUs of the seven good ones, though the lost one has a low index."""
    answer = ask(capsys, "--cluster", broken, "--gpus", "4")
    placement = answer["plans"][0]["plan"]["placement"]

    assert len(placement) == 4
    assert 2 not in placement


def step_s(answer: dict) -> float:
    return answer["plans"][0]["estimate"]["step_s"]["value"]


def test_the_answer_is_the_faster_of_with_and_without(broken, capsys) -> None:
    """No GPU count given: at least as fast as all eight, and as the most that do without GPU 2."""
    question = ("--cluster", broken, "--model", "llama3-8b", "--global-batch", "28", "--framework", "any")
    free, whole, sound = (
        ask(capsys, *question),
        ask(capsys, *question, "--gpus", "8"),
        ask(capsys, *question, "--gpus", "7"),
    )

    assert step_s(free) == min(step_s(whole), step_s(sound))


def test_leaving_a_gpu_out_is_said(broken, capsys) -> None:
    """Seven GPUs divide a batch of 28 and eight do not: without GPU 2 the step is faster, and the answer says so."""
    answer = ask(capsys, "--cluster", broken, "--model", "llama3-8b", "--global-batch", "7", "--framework", "any")

    assert 2 not in answer["plans"][0]["plan"]["placement"]
    assert any("GPU 2" in note and "left out" in note for note in answer["assumed"])


def test_neither_with_nor_without_is_infeasible() -> None:
    def nothing(count: int):
        raise Infeasible(f"no plan for {count}")

    with pytest.raises(Infeasible, match="no plan for 8"):
        with_or_without(nothing, gpus=8, unsound=(2,))
