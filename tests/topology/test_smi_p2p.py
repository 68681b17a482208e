from hypothesis import given
from hypothesis import strategies as st

from tests.topology.captures import text
from topology.readers.smi_p2p import parse_p2p


def test_the_captures():
    (crossed,) = parse_p2p(text("topo/p2p/4gpu_crossed_nv4_p2p_rw.txt"))
    assert crossed.denied == {"0-1": "CNS", "0-2": "CNS", "1-3": "CNS", "2-3": "CNS"}
    assert crossed.status[0, 3] == crossed.status[1, 2] == "OK"
    assert parse_p2p(text("topo/p2p/2x2080ti_p2p_p_ns.txt"))[0].denied == {"0-1": "NS"}
    assert parse_p2p(text("topo/p2p/2x5090_p2p_rw_gns.txt"))[0].denied == {"0-1": "GNS"}
    assert parse_p2p(text("topo/p2p/l4_2gpu_p2p_r_cns.txt"))[0].denied == {"0-1": "CNS"}
    (h100,) = parse_p2p(text("topo/p2p/h100_8gpu_p2p_r_ok.txt"))
    assert h100.denied == {}
    assert len(h100.status) == 56


def test_two_tables_in_one_text_with_ansi_and_legend():
    tables = parse_p2p(text("h200x4/nvidia_smi_topo_p2p.txt"))
    assert [table.gpus for table in tables] == [(0, 1, 2, 3)] * 2
    assert all(len(table.status) == 12 and not table.denied for table in tables)


def test_the_command_line_names_the_capability():
    table = "\n \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n GPU1\tNS\tX\t\n"
    read, write = parse_p2p(f"$ nvidia-smi topo -p2p r{table}$ nvidia-smi topo -p2p w{table}")
    assert (read.capability, write.capability) == ("r", "w")
    assert read.status == {(0, 1): "OK", (1, 0): "NS"}  # access may work in one direction only
    assert read.denied == {"0-1": "NS"}


def test_unknown_status_is_reported():
    (table,) = parse_p2p(" \tGPU0\tGPU1\tGPU2\n GPU0\tX\tOK\tMAYBE\n GPU1\tOK\tX\tOK\n GPU2\tMAYBE\tOK\tX\n")
    assert ("GPU0", "GPU2", "MAYBE") in table.unknown
    assert (0, 2) not in table.status


_WORDS = st.sampled_from(["GPU0", "GPU1", "X", "OK", "CNS", "GNS", "NS", "U", "NV4", "SYS", "\t", "\n", " "])


@given(st.one_of(st.text(), st.lists(_WORDS, max_size=60).map("".join), st.lists(_WORDS, max_size=60).map(" ".join)))
def test_no_text_crashes_the_parser_or_invents_access(text):
    for table in parse_p2p(text):
        for status in table.status.values():
            assert status in text
