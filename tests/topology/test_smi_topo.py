"""`topo -m` against the answer key of real captures, the traps one by one, and random text."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.topology.captures import MATRICES, TOPO, matrix
from topology.readers.smi_topo import closest_nics, nv_count, parse_topo


@pytest.mark.parametrize("key", MATRICES, ids=lambda key: key["file"][:2])
def test_every_capture_matches_its_answer_key(key):
    topo = parse_topo((TOPO / key["file"]).read_text())

    assert len(topo.gpus) == key["gpu_count"]
    assert len(topo.gpu_rows) == key["gpu_rows_present"]
    assert {pair: nv_count(label) for pair, label in topo.pairs.items() if nv_count(label)} == key["nvlink_pairs"]
    by_class = {}
    for pair, label in topo.pairs.items():
        by_class.setdefault(label, []).append([int(gpu) for gpu in pair.split("-")])
    # Large machines have the number of pairs in the key, not the list.
    expected = {
        label: pairs if isinstance(pairs, int) else len(pairs) for label, pairs in key["pairs_by_class"].items()
    }
    assert {label: len(pairs) for label, pairs in by_class.items()} == expected
    for label, pairs in key["pairs_by_class"].items():
        assert isinstance(pairs, int) or by_class[label] == pairs
    assert list(topo.columns) == key["columns"]
    assert list(topo.nics) == key["nic_labels"]
    assert len(topo.nic_rows) == key["nic_rows_present"]
    assert (topo.legend or None) == key["nic_legend"]
    for said in key["per_gpu"] or []:
        read = topo.affinity[int(said["gpu"][3:])]
        assert (read.cpu, read.numa, read.gpu_numa_id) == (
            said["cpu_affinity"],
            said["numa_affinity"],
            said["gpu_numa_id"],
        )
    closest = {f"GPU{gpu}": {"class": label, "nics": list(nics)} for gpu, (label, nics) in closest_nics(topo).items()}
    assert closest == (key["closest_nic_per_gpu"] or {})
    gpu_nic = {
        f"GPU{gpu}": {topo.nic_name(nic): label for nic, label in classes.items()}
        for gpu, classes in topo.gpu_nics.items()
    }
    assert gpu_nic == (key["gpu_nic"] or {})
    assert topo.unknown == ()


@pytest.mark.parametrize("key", [key for key in MATRICES if key["complete"]], ids=lambda key: key["file"][:2])
def test_a_complete_capture_leaves_no_problem(key):
    assert parse_topo((TOPO / key["file"]).read_text()).problems == ()


FOUR = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV4\tPIX\tSYS\tPIX\t0-7\t0\t\tN/A
GPU1\tNV4\t X \tSYS\tPHB\tSYS\t0-7\t0\t\tN/A
GPU2\tPIX\tSYS\t X \tNODE\tSYS\t8-15\t1\t\tN/A
GPU3\tSYS\tPHB\tNODE\t X \tPXB\t8-15\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\tPXB\t X \t\t\t\t
"""
PAIRS = {"0-1": "NV4", "0-2": "PIX", "0-3": "SYS", "1-2": "SYS", "1-3": "PHB", "2-3": "NODE"}


def wrapped_header(text):
    header, rest = text.split("\n", 1)
    return header.replace("\tNIC0", "\n\tNIC0") + "\n" + rest


def wrapped_rows(text):
    return re.sub(r"(GPU\d\t(?:[^\t]*\t){2}[^\t]*)\t", r"\1\n\t", text)


TRAPS = {
    "ansi": lambda t: t.replace("\tGPU0\t", "\t\x1b[4mGPU0\t", 1).replace("GPU NUMA ID", "GPU NUMA ID\x1b[0m"),
    "ansi without its escape": lambda t: t.replace("\tGPU0\t", "\t[4mGPU0\t", 1).replace("NUMA ID", "NUMA ID[0m"),
    "spaces for tabs": lambda t: t.expandtabs(8),
    "header without leading tab": lambda t: t.lstrip("\t"),
    "rows out of order": lambda t: "\n".join([t.split("\n")[0], *reversed(t.rstrip("\n").split("\n")[1:])]),
    "preamble": lambda t: "$ nvidia-smi topo -m\nThis is the box with GPU0 in slot 3, see below\n\n" + t,
    "quoted": lambda t: "".join(f"> {line}\n" for line in t.splitlines()),
    "fenced": lambda t: f"```\n{t}```\nthanks!\n",
    "windows lines": lambda t: t.replace("\n", "\r\n"),
    "wrapped header": wrapped_header,
    "header broken between columns and words": lambda t: t.replace("CPU Affinity", "CPU\nAffinity", 1),
    "header broken inside a word": lambda t: t.replace("\tNIC0\tCPU", "\tNI\nC0\tCPU", 1),
    "header broken inside a column name": lambda t: t.replace("GPU NUMA ID", "GPU NU\nMA ID", 1),
    "wrapped rows": wrapped_rows,
    "wrapped before the affinity": lambda t: t.replace("\t0-7", "\n\t0-7").replace("\t8-15", "\n8-15"),
    "wrapped inside the affinity": lambda t: t.replace("0-7\t", "0-7\n").replace("8-15\t", "8-9,\n10-15\t"),
    "markdown table": lambda t: "".join("| " + line.replace("\t", " | ") + " |\n" for line in t.splitlines()),
    "fused cells": lambda t: t.replace("SYS\tPHB\tSYS", "SYSPHB\tSYS").replace("PIX\tSYS\tPIX", "PIXSYSPIX"),
    "old SOC label": lambda t: t.replace("SYS", "SOC"),
    "no NIC row": lambda t: t.rsplit("NIC0", 1)[0],
    "repeated": lambda t: t + "\n" + t,
}


@pytest.mark.parametrize("trap", TRAPS)
def test_each_trap_gives_the_same_pairs(trap):
    topo = parse_topo(TRAPS[trap](FOUR))
    assert topo.pairs == PAIRS
    assert closest_nics(topo)[0] == ("PIX", ("NIC0",))
    assert closest_nics(topo)[3] == ("PXB", ("NIC0",))
    assert [topo.affinity[gpu].numa for gpu in range(4)] == ["0", "0", "1", "1"]


def test_a_cut_row_keeps_what_was_printed_but_not_a_half_count():
    cut = "\tGPU0\tGPU1\tGPU2\nGPU0\t X \tNV1"  # NV18 cut in the middle
    topo = parse_topo(cut)
    assert topo.pairs == {}
    assert any("cut" in problem for problem in topo.problems)
    other_row = parse_topo("\tGPU0\tGPU1\tGPU2\nGPU1\tNV18\t X \tNV18\nGPU2\tNV18\tNV18\t X\nGPU0\t X \tNV1")
    assert other_row.pairs == {"0-1": "NV18", "0-2": "NV18", "1-2": "NV18"}


def test_a_terminal_code_inside_a_word_does_not_make_another_word():
    topo = parse_topo("\tGPU0\tGPU1\nGPU0\t X \tNV\x1b[4m2\nGPU1\tNV\x1b[4m2\t X \n")
    assert topo.pairs == {}


def test_a_shifted_row_is_refused_not_believed():
    topo = parse_topo("\tGPU0\tGPU1\tGPU2\nGPU0\t X \tSYS\tSYS\nGPU1\tNV4\tSYS\t X \n")
    assert topo.pairs == {"0-1": "SYS", "0-2": "SYS"}
    assert any("shifted" in problem for problem in topo.problems)


def test_unknown_tokens_and_columns_are_reported_not_guessed():
    topo = parse_topo(
        "\tGPU0\tGPU1\tCPU Affinity\tFancy Column\nGPU0\t X \tXLINK7\t0-3\tblue\nGPU1\tXLINK7\t X \t0-3\tred\n"
    )
    assert topo.pairs == {}
    assert {token for _, _, token in topo.unknown} == {"XLINK7"}
    assert "Fancy Column" in " ".join(topo.columns) or topo.columns[0] == "CPU Affinity"


def test_rows_that_disagree_are_a_problem():
    topo = parse_topo("\tGPU0\tGPU1\nGPU0\t X \tNV4\nGPU1\tSYS\t X \n")
    assert topo.pairs == {"0-1": "NV4"}
    assert any("NV4 in one row and SYS" in problem for problem in topo.problems)


def test_rows_without_a_header_are_placed_by_their_x():
    topo = parse_topo("GPU0\t X \tNV4\nGPU1\tNV4\t X \n")
    assert topo.pairs == {"0-1": "NV4"}
    assert any("header" in problem for problem in topo.problems)


def test_mp_is_known_to_hide_nvlink():
    text = "$ nvidia-smi topo -mp\n\tGPU0\tGPU1\nGPU0\t X \tPIX\nGPU1\tPIX\t X \n"
    assert parse_topo(text).hides_nvlink
    assert not parse_topo(text.replace("-mp", "-m")).hides_nvlink


def test_a_partial_legend_names_what_it_can():
    text = FOUR + "\nNIC Legend:\n\n  NIC0: mlx5_1\n  NIC9: mlx5_9\n"
    topo = parse_topo(text)
    assert closest_nics(topo)[0] == ("PIX", ("mlx5_1",))
    assert any("NIC9" in problem for problem in topo.problems)


def test_prose_is_not_a_matrix():
    assert parse_topo("GPU0 and GPU1 are joined by NV4, GPU2 is not.") is None
    assert parse_topo("") is None


def test_a_text_without_end_is_read_in_part():
    topo = parse_topo("\tGPU0\tGPU1\nGPU0\t X \tNV4\n" + "log line of GPU0\n" * 30_000)
    assert topo.pairs == {"0-1": "NV4"}
    assert any("first 20000 lines" in problem for problem in topo.problems)


def test_a_header_goes_on_over_few_lines():
    """Each line is read with those before it: as many as there are would take minutes."""
    found = parse_topo("GPU0\tx y z\n" * 20_000)

    assert found is None or not found.pairs


_WORDS = st.sampled_from(
    [
        *("GPU0", "GPU1", "GPU2", "NIC0", "mlx5_0", "X", " X ", "NV18", "NV1", "NV", "8", "PIX", "NODE", "PIXNODE"),
        *("SYS", "OK", "CPU Affinity", "NUMA Affinity", "GPU NUMA ID", "0-3", "N/A"),
        *("\t", "\n", "  ", "\x1b[4m", "[0m", "> ", "|", "\u00e9"),
    ]
)


@given(st.one_of(st.text(), st.lists(_WORDS, max_size=80).map("".join), st.lists(_WORDS, max_size=60).map(" ".join)))
def test_no_text_crashes_the_parser_or_invents_a_link(text):
    topo = parse_topo(text)
    for label in topo.pairs.values() if topo else ():
        assert not label.startswith("NV") or label in text


@given(st.data())
def test_damage_to_a_real_capture_never_invents_a_link(data):
    text = matrix(data.draw(st.sampled_from(["03_", "42_", "56_", "69_"])))
    truth = parse_topo(text).pairs
    at = data.draw(st.integers(0, len(text)))
    if data.draw(st.booleans()):
        damaged = text[:at]
    else:
        damaged = text[:at] + data.draw(st.text(alphabet="\t\n XNVPISYODE018", max_size=6)) + text[at + 1 :]
    read = parse_topo(damaged)
    for pair, label in read.pairs.items() if read else ():
        assert not label.startswith("NV") or label in damaged
        if damaged == text[:at]:
            assert truth[pair] == label  # a cut text tells less, never something else
