"""Write examples/validation/serving.md: predictions compared with published serving points, by source, and the ranges
of engines.

    python tests/bench/serving_table.py POINTS.jsonl.gz --out examples/validation/serving.md

An engine's spread is the error that four of five of its points stay within. The table says which share of the points of
a source, model and GPU a spread holds that was learned from all others.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

from planner.validate.serving_points import QUANTITIES, engine_named, validate_point
from planner.validate.serving_report import by_group, read_points, summarise_points
from tests.bench.serving_ranking import ranking_lines

HELD = 0.8
TEXT = """# Serving: predictions compared with published points

Points of public sources, each predicted from datasheets by simulating its requests: aiconfigurator's accuracy sample
(ai-dynamo/aiconfigurator), InferenceX's DeepSeek-R1 runs (SemiAnalysisAI/InferenceX), TensorRT-LLM's performance tables,
LLM-Inference-Bench (argonne-lcf, static batches of 2024). They were **in view** while the model was made. Fitted to them are
`host_request_s` and `host_launch_s` of TensorRT-LLM from 1.0 on (`simulator/serving/engines.toml`), by hand to first tokens of
gpt-oss-120b on B200 with few clients, and `first_burst_s` to what mean and median of DeepSeek-R1 on H200 differ by (SGLang,
TensorRT-LLM 1.1 and 1.3; 1.2 between them). All other times of hosts are as their makers and others
measured them by themselves. Kernels are priced from datasheets and from kernels measured by themselves, not from these points.
The other groups are a test of the rest of the model, not a prediction made before the fact. GLM-5 was first predicted after its
attention had been described; launches, hosts and sums of SGLang changed afterwards, by what others measured.

## By cause

What sources say and these points do not was changed last, with this effect on a token's time (throughput where only that is
stated), medians and means of absolute errors:

| | tokens, all | by group |
|---|--:|---|
| before | 9.2 (14.8) % | |
| products of few rows, their casts, their depth (`product_kernels.toml`) | 8.5 (15.3) % | Qwen3.5 on B200 13 to 8 %, GLM-5 12 to 4, DeepSeek-R1 with TensorRT-LLM on H200 10 to 6; Llama 3.1 70B, whose host had been fitted without, 2 to 8 |
| all-reduces by engine (`reduce_kernels.toml`), with their norms | 8.1 (14.9) % | Qwen3 235B on H100 8 to 4 %; gpt-oss-120b with vLLM 11 to 15, GLM-5 4 to 9 |
| hosts of vLLM and SGLang as others measured them | 8.8 (15.2) % | Llama 3.1 70B, vLLM 7 to 2 %; DeepSeek-R1 with SGLang on H200 5 to 3, on B300 12 to 7, on B200 10 to 14 (its host had been fitted there); throughput of vLLM of 2024 on H100 18 to 10, 14 to 6 and 24 to 14 %, on GH200 8 to 4, 15 to 9 and 18 to 7 % |
| attention of an answer | 8.7 (15.2) % | throughput of TensorRT-LLM of 2024 on H100 13 to 10 %; Qwen3 235B 4 to 6 |
| experts of gpt-oss in vLLM, sums with norms from 0.17 on | 8.1 (14.9) % | gpt-oss-120b with vLLM 12 to 5 %, Kimi K2.5 on H200 4 to 2; first tokens of gpt-oss-120b 12 to 25 |
| the tokenizer of a prompt (`host_token_s`) | first tokens 22.3 (30.3) to 20.3 (30.6) % | gpt-oss-120b with vLLM 25 to 16 %, with TensorRT-LLM 18 to 13, Kimi K2.5 on H200 8 to 6; Llama 3.1 70B 3 to 7, Llama 3.1 8B with TensorRT-LLM 1.0, whose requests' wait was fitted without, 40 to 46 |
| ranks wait for the one with the most experts to read and the most rows (below) | 8.2 (15.0) %, joint engines 8.0 (14.9) | DeepSeek-R1 with TensorRT-LLM on H200 8 to 4 %, with SGLang on B200 14 to 10, separated with TensorRT-LLM on H200 13 to 7; throughput of all points 15 to 13 %; the first choice is 1.5 % behind the best instead of 2.9, of Qwen3.5 on B200 1.3 instead of 25; worse: Qwen3 235B with TensorRT-LLM 1.0 on H100 6 to 13, DeepSeek-R1 with SGLang on B300 7 to 11, separated on H100 7 to 12, Kimi K2.5 on B300 5 to 8, DeepSeek-R1 with TensorRT-LLM on B200 32 to 35 |
| places and turns of separated engines (below) | first tokens of separated engines 67 (72) to 44 (57) % | DeepSeek-R1 with TensorRT-LLM on H200 75 to 39 %, B300 64 to 45, H100 89 to 57; throughput of separated engines 17 to 7 %; their tokens 11 to 11 |
| steps of TensorRT-LLM 1.0 and 1.1 as its makers limit them (below) | 7.9 (14.8), joint engines; first tokens 19.7 (29.2) to 19.1 (28.3) % | first tokens of Llama 3.1 8B 46 to 39 %, Qwen3 235B 21 to 19; tokens of Qwen3 235B 13 (13) to 14 (13) |
| kernels of experts pass tokens of other ranks (below) | 8.0 (14.8), joint engines; first tokens 19.0 (28.3) % | tokens of DeepSeek-R1 with SGLang on B300 11.4 to 10.6 %; worse: its first tokens 29 (41) to 31 (41), separated ones on B300 45 (76) to 45 (79) |
| latent attention of answers by its heads and the cache's bits (`LATENT_READ`) | 7.9 (14.8), joint engines; separated ones 11.3 (19.0) to 11.0 (17.6) % | DeepSeek-R1 with SGLang on B200 10 to 8 %, with TensorRT-LLM on H200 4 (4) to 3 (5), separated on B300 15 to 12 and its first tokens 45 to 39, separated on H200 10 to 8; worse: DeepSeek-R1 with SGLang on B300 10.6 to 11.1 %, throughput of separated engines 7 (16) to 11 (17) |
| experts read as fast as memory allows, sums with their norm on Blackwell, SGLang's experts on Hopper, shared experts next to routed ones, casts of many rows (below) | 8.3 (14.4), joint engines; first tokens 19.0 (28.1) to 18.6 (27.7) % | means: DeepSeek-R1 with SGLang on B200 13.5 to 12.3 %, with TensorRT-LLM there 35.8 to 33.8, Qwen3.5 on B300 16.6 to 14.3, GLM-5 13.1 to 9.3, separated on H100 11.6 to 9.5; worse in the median: DeepSeek-R1 with SGLang on H200 3.2 to 5.7 %, with TensorRT-LLM there 3.1 to 4.6, separated there 8 to 12, with SGLang on B300 11 to 15, Kimi K2.5 on H200 2.2 to 4.8, on B300 8 to 10, Qwen3.5 on B200 9.6 to 10.5 |
| at most 1,024 answers on a rank of separated engines, and none of them with Cutlass' experts (below) | separated ones: first tokens 43 (61) to 42 (54) %, tokens 10.6 (18.0) to 9.3 (14.0), throughput 10.6 (16.7) to 9.4 (16.3), with the row above | first tokens on B300 39 (71) to 39 (44) %, tokens there 12 (33) to 7 (18); worse: first tokens with SGLang on H200 43 (44) to 44 (48), where queues of prompts are near what one more percent of a step fills |
| what comes from another pool continues next to other answers, in a step that reads nothing (below) | separated ones: tokens 9.3 (14.0) to 7.9 (10.8) %, first tokens 42 (54) to 43 (53), throughput 9.4 (16.3) to 13.1 (19.4) | tokens on B300 7 (18) to 6 (6) %, its first tokens 38 to 10; worse: throughput on H200 7 to 20 %, on H100 25 to 41 |
| ranks wait for the fullest as groups of experts make it (below) | 8.3 (14.4) %, joint engines; separated ones 7.9 (10.8) to 7.0 (10.3) | DeepSeek-R1 with TensorRT-LLM on H200 4.6 to 2.8 %, separated there 12 to 8; worse: with SGLang on B300 15 to 17, separated on H100 12 to 17 |
| the output of latent attention in 4 bits (below) | 8.3 (14.4) to 8.1 (14.2), joint engines; separated ones: first tokens 46 (53) to 41 (46) % | in nvfp4: separated on B300 tokens 5 to 2 %, first tokens 81 (87) to 12 (26); DeepSeek-R1 with TensorRT-LLM on B200 35 to 33, with SGLang there 8.5 to 7.7, on B300 18 to 15; Kimi K2.5 on B300 10 to 9 |
| ranks' rows differ by how popular their experts are (below) | separated ones: first tokens 41 (46) to 30 (41) %, tokens 6.7 (10.0) to 6.7 (9.4); first tokens, joint engines 18.3 (27.2) to 18.1 (27.0) | first tokens of DeepSeek-R1 with TensorRT-LLM on H200 14 to 11 %, separated there 42 to 37, on B300 11 to 8; its throughput offline on H200 47 to 36; worse: Qwen3 235B offline on H200 2 to 8 |
| TensorRT-LLM by release, uneven experts in Cutlass' kernels, places of separated engines (below), no fitted host | 8.7 (14.6), joint engines; separated ones: first tokens 30 (41) to 21 (34) %, tokens 6.7 (9.4) to 5.7 (8.8), throughput 11.0 (16.0) to 7.5 (9.8) | throughput of DeepSeek-R1 with TensorRT-LLM, separated, on H200 14 to 5 %, on H100 39 to 11; gpt-oss-120b offline with TensorRT-LLM 1.x on H200 23 to 36 |
| attention over prompts and of answers as kernels take by themselves, windows, queries and results of latent attention, 16-bit products on Hopper (below) | 8.7 (14.6) to 8.6 (14.7), joint engines; first tokens 17.6 (26.7) to 17.7 (26.7); separated ones: tokens 5.6 (7.1) to 4.8 (7.1), throughput 7.5 (9.8) to 7.2 (9.5), first tokens 20.6 (29.3) to 20.3 (30.1) | gpt-oss-120b offline with TensorRT-LLM 1.x on H200 37 (31) to 29 (25) %, DeepSeek-R1 there 33 to 30, Llama 3 8B with TensorRT-LLM of 2024 on H100 10 to 9, Qwen3.5 on B300 12 to 11, Qwen3 235B with TensorRT-LLM 1.0 14 (16) to 13 (15); kernels of prompts alone 10 to 75 % short to 4 to 20; worse: throughput of joint engines 12.3 (26.0) to 12.4 (26.1), of TensorRT-LLM before 1.0 on Hopper, predicted too slow already and priced by tables of 1.3 (Llama 2 7B on H100 3 to 5, on GH200 9 to 12, Mixtral 8x7B 10 to 13, Mistral 7B on GH200 22 to 27, GPT-J 44 to 46), first tokens of separated engines on B300 8 (18) to 11 (20) |
| 16-bit products on Hopper at the clocks that the power limit allows, full ones next to few prompts (below) | 8.6 (14.7) to 8.6 (14.8), joint engines; first tokens 17.7 (26.5) to 17.9 (26.7) | of our own server, out of sample, 3.1 to 1.5 % (`serving_2xH200.md`); DeepSeek-R1 with SGLang on H200 5.7 to 5.3 %, throughput of separated engines there 5.2 to 4.6; worse, where predictions were early before: Kimi K2.5 on H200 5 to 7 %, its first tokens 8 to 9, Llama 3.1 8B with TensorRT-LLM 1.0 10 to 11, 70B with 0.14 18 to 19 and its first tokens 18 to 23 |
| FlashInfer's sums with multicast, which SGLang takes on Blackwell from 0.5.10 on (`reduce_kernels.toml`) | 8.6 (14.8) to 8.7 (14.8), joint engines; first tokens 17.9 (26.7) to 17.9 (26.7) | tokens of DeepSeek-R1 with SGLang on B300 13.6 (19.0) to 12.1 (19.3) %; worse: its throughput 42.9 to 44.3 in the mean, with SGLang on B200, early before, 7.8 (12.0) to 8.0 (12.5) |
| A100 of 40 GB where a row states no memory (below) | throughput 12.1 (25.4) to 8.8 (18.3) % | throughput on A100, 406 points, 37 (51) to 16 (27) % |
| sums and attention of answers on Ampere and Ada by tables (`reduce_kernels.toml`, `ANSWERED_S`), a static batch in one stage of a pipeline at a time, what several GPUs take the host of vLLM before 0.8 (`host_ranks_s`) | throughput 8.8 (18.3) to 7.4 (14.8) % | of TensorRT-LLM of 2024 on A100 10 (33) to 7 (15), 20 to 15 and 23 to 17 %, of vLLM there 7 to 3, 8 to 5 and 20 to 7, on H100 9.7 to 7.1, 12.6 to 8.2 and 21 to 16 in the mean; worse: TensorRT-LLM 0.17 on A100 and L40S by 0.1 to 0.5 points, LLaMA 7B on A100 17.9 to 18.6 |

The largest term of what is off, by group:

- **Experts over ranks.** A layer goes on once the slowest rank has its experts' products, and chance gives one rank more than
  others: of 4 tokens that choose 8 of 256 experts each, a rank of eight has 3.8 to read in the mean and the fullest 6.5; of 64
  tokens 27.8 and 30.3, and 76 rows where the mean is 64. Both are counted by the mean and variance of a choice by chance
  (`on_fullest_rank` of `simulator/serving/expert_choice.py`, which agrees with draws within 6 %). Tables of kernels are loaded evenly, so
  they have none of it. DeepSeek's tokens choose among four of eight groups of experts, so half of them pass a rank that holds one group,
  and its fullest rank has 7.7 experts of 4 tokens and 81 rows of 64. Besides, ranks differ in how popular their experts are: NVIDIA
  counted a standard deviation of 1.28 times the mean load of DeepSeek-R1's experts, and of 0.48 of ranks of eight (NVIDIA/TensorRT-LLM
  blog04_Scaling_Expert_Parallelism_in_TensorRT-LLM.md, Table 1), which is that of the loads that kernels of experts are measured under
  (`POPULAR`). The experts that few tokens meet agree with an even choice, though: with that popularity tokens of networks of experts
  would be 11 % off instead of 9, DeepSeek-R1 with SGLang on H200 9 % early instead of 3 % late. Of SGLang 0.5.9's points in nvfp4 on B200 those with experts over eight ranks were 13 % early. Kernels of a rank besides pass the tokens
  that chose none of its experts (`OTHERS_PASSED`): of 8,192 tokens of DeepSeek-R1 a rank of eight takes 0.32 ms, not an eighth of 0.80.
- **Answers of separated engines on Hopper**: on H200 they are 6 to 9 % early, with attention data-parallel and 64 answers and more a rank 17 to
  20 % there and on H100, where experts are over ranks; on B300 3 to 6 % where they are not. A request whose cache has come joins the next step as an
  answer, in graphs, by all sources (`process_prebuilt` of SGLang's schedule_batch.py; TensorRT-LLM's py_executor.py has it among generation
  requests; vLLM reads its last token again, which counts as an answer); a step that reads a token in its place, which the host has to issue, hid
  this. Queries and results of latent attention are as wide as the compressed vectors for every head, 4 kB of an answer and layer that pass memory.
  Cutlass' experts loaded unevenly take 519 to 541 us of 512 tokens where evenly loaded ones take 397 (ai-dynamo/aiconfigurator 0.12,
  h200_sxm, moe_perf.parquet, power laws of 1.01 and 1.2), which would be 7 of the 9 ms that are missing there. Blocks of latent
  attention by themselves are priced within 7 % of mla_generation_module_perf.parquet of TensorRT-LLM there with up to 64 answers and up to
  20 % short with 256; on B200 8 us (17 %) long with one answer and 16 heads, 14 % short with 256 answers and 128 heads.
- **The format of latent attention's output**: NVIDIA's checkpoints of DeepSeek-R1 in nvfp4 since version 2 have its weights in 4 bits (model cards
  of nvidia/DeepSeek-R1-FP4-v2 and DeepSeek-R1-0528-FP4-v2), which 393.6 B numbers in the files confirm; GLM-5's has 16 bits.
- **TensorRT-LLM 1.0 and 1.1** have the host that was measured of 1.2 (NVIDIA/TensorRT-LLM pull request 10273). With a host fitted to
  Llama 3.1 8B that model was 7 (9) and is 10 % (11) late, first tokens 39 and 41; Qwen3 235B is 14 % off with either. What a token
  takes longer with short answers, by prompts and clients, shows what was run: prompts that come together and are read two a step of
  1,024 tokens, three of 512, whatever the number of GPUs. So NVIDIA's generator of configurations limits a step
  (ai-dynamo/aiconfigurator @efcae124 and since: the prompt, the clients and 1,500 tokens), which is assumed where a row of these
  releases states no limit (InferenceX had the prompt, the clients and 64 then, @ec90f3fe); and its benchmark sends lengths that do
  not vary, which no row states and nothing here takes from the release: with such lengths tokens of Qwen3 235B are 5 % off. That they
  do not the points show: with four clients a token takes 13.3 ms with answers of 128, 256 and 512 alike, as if no prompt came between.
  Taken so of all rows that state nothing, first tokens would be 38 instead of 19 % off.
- **TensorRT-LLM 1.2 on Hopper** takes 13 us a layer longer for experts in 8-bit blocks and 10 to 15 us for latent attention of answers
  than 1.3, by tables of both (`slower` in `simulator/serving/engines.toml`); on B200 attention of both takes as long.
- **Attention by itself**, over prompts (`prompt_kernels.toml`) and of answers (`answer_kernels.toml`), is priced from tables of kernels by
  themselves, which it describes within 4 to 20 %, most within 6 to 11. Of a short prompt a launch, what every query passes and the filling of
  pipelines take more than its pairs (at 1,024 tokens 1.2 to 2.4 times what pairs and a start take); of many short answers each pair of an answer
  and a key head starts a program, 7 to 12 ns of a launch on Blackwell and 25 to 36 on Hopper (256 answers of gpt-oss in TensorRT-LLM on
  H200: 76 us a layer). Engines' 8-bit caches on Hopper are read at 0.5 to 0.67 of the memory's rate by vLLM and SGLang, 0.8 by TensorRT-LLM. Layers
  with windows take the same law, which agrees with tables of windows within 16 % (TensorRT-LLM on Hopper 20 % short).
- **Clocks**: a GPU at its power limit multiplies a quarter slower than at full clocks (Hopper, 16 bits). Tables of kernels of less than a
  millisecond have 0.85 to 0.92 of the datasheet's rate where tiles fill the GPU, those of 32,768 rows 0.69 to 0.79. A prompt that is read next to answers finds the power that
  these left: it takes 8 to 15 % less than the same prompts over and over, as the executor measured (`simulator/serving/power.py`). In 8 bits
  such tables differ more by engine than by clocks, and Blackwell's have not been measured so.
- **Experts by Cutlass' kernels** take the longer of reading and multiplying each: popular ones have rows to multiply while others are
  read. Tables of uneven loads (1.3.0rc20) are 1 to 14 % off so from 1,024 tokens on, 8 to 29 % if all are alike.
- **Places of separated engines** follow NVIDIA's recipes (NVIDIA/srt-slurm @c88ef731): on Hopper a decoding rank has room for many more
  answers than clients where all places would be filled exactly. Requests are counted rightly (Little's law closes within 4 %); what
  is off there is the rate of prompts on H100 (154 clients of 8,192 tokens: throughput +68 %).
- **Shared experts** are computed next to the routed ones, on a stream of their own, with few tokens (`shared_beside` of `engines.toml`), and
  cost what they read; they were priced one after the other. By itself that made tokens early wherever it was right, so something else of
  every layer was missing by as much. On Blackwell it is the norm in FlashInfer's sums, 12 us a layer with eight GPUs (`reduce_kernels.toml`),
  and experts, which were priced as read at the datasheet's rate: the tables' even loads choose an expert of each of eight groups, and
  where a router keeps four groups, all of which tie, half the experts are read (64 tokens of DeepSeek-R1, TensorRT-LLM 1.2: 64 % of the
  time that all would take at the datasheet's rate). So were both releases' tables of SGLang on H200 apart by a factor of two; without
  DeepSeek-R1 they agree within a tenth, and are taken (`expert_kernels.toml`). Around Qwen3.5's attention and experts, two to four kernels
  a layer had not been counted. Still missing where neither is known: TensorRT-LLM on H200 and Kimi K2.5 with vLLM there are 5 to 8 % early
  with up to four clients. Checked and not the cause: products with the compressed vectors of latent attention (two kernels of 4.3 us each,
  mla_bmm_perf.parquet; with fewer small ones the block takes as long as it does by itself), and SGLang's are in 16 bits whatever the weights
  (block_quant_dequant of its loader).

- **The first burst**, which is a tenth of the requests where a client sends ten: DeepSeek-R1 with SGLang 0.5.9 on H200, four
  clients, has a mean of 260 ms, a median of 156 and a p99 of 1,048. Where a source states mean and median, the first burst's
  requests wait so much longer than the median: on H200 with four and eight clients and prompts of 1,024 tokens 0.9 to 1.0 s with
  SGLang 0.5.9, 0.7 to 0.8 s with 0.5.12, 1.2 to 1.9 s with TensorRT-LLM 1.1, 0.4 s with 1.3, of which their prompts take 0.1 s; with
  64 clients and 8,192 tokens 15.6 s, given 9.6. On B300 with SGLang 0.5.12 nothing with up to 16 clients, 4.5 s with 128. As far
  as engines' own reports tell, they wait for code that is compiled when a number of tokens is first seen: the benchmark warms
  up with one prompt over and over (`test_input` of its benchmark_serving.py), and then sends prompts of 80 to 100 % of a length.
  TensorRT-LLM's latent attention joins keys by a function that `torch.compile` compiles again in the first prompts
  (NVIDIA/TensorRT-LLM pull request 11743, which does it at the start; its other attention has no such function, and does not
  wait so); SGLang of 2025 compiled DeepGEMM's products by their rows while prompts waited (sgl-project/sglang issue 5031). How
  long that takes is stated nowhere, so the seconds are those of the runs. The accuracy sample's times are means of such runs
  (29 of its points are points of InferenceX), so rows of closed loops are predicted with that wait
  (`first_burst_s`), which is listed as assumed. It was read from DeepSeek-R1 on H200; of groups that it was not read from,
  first tokens went from 50 to 38 % (Qwen3.5, B200), 39 to 29 % (DeepSeek-R1, SGLang, B200), 32 to 17 % (GLM-5, H200), 29 to 17 %
  (Qwen3.5, B300) and 47 to 23 % (DeepSeek-R1, TensorRT-LLM, B200); then clients were given ten requests each. TensorRT-LLM shows
  it with latent attention alone: gpt-oss-120b, Qwen3 235B and Llama 3.1 8B do not wait so. The 99th percentiles,
  which no part of it was read from, agree on H200 (20 % with SGLang, 37 % with TensorRT-LLM, below). Estimates of a person's own
  question leave it out, and all that is of clients who ask together at the beginning. Points that state medians alone are compared with predicted medians.
- **Operators that Python calls** in vLLM, where `torch.compile` does not look into attention, experts and sums over ranks: ten of
  latent attention and seven of Marlin's experts a layer, at 67 us each as eager vLLM was measured (`simulator/serving/launches.py`,
  counted in its source). A prompt of 1,024 tokens of Kimi K2.5 then takes 80 to 100 ms of the host on however many GPUs.
  First tokens went from 20 to 13 % (gpt-oss-120b, B200) and from 16 to 9 % (Kimi K2.5, H200); those of Kimi on B300 are now a
  quarter late with up to 8 clients and 1,024 tokens, where they were a quarter early: 67 us are another host's. First tokens of
  Qwen3 235B with TensorRT-LLM 1.0 take 30 to 60 ms longer than predicted whatever the load.
- **Settings of the scheduler that no row states** are taken as the engine's makers publish them for such a deployment
  (`planner/validate/makers_settings.py`), and listed as assumed: SGLang on Blackwell looks for requests at each tenth step, from 16
  clients on at each thirtieth (its cookbook for DeepSeek-R1 on B200; for Qwen3.5 the cookbook leaves it open, which is a step
  beyond it, and the points agree); TensorRT-LLM's ranks of attention data-parallel read prompts together, or after 60 steps,
  and its cache is in 8 bits next to 8-bit weights (NVIDIA's configurations). Without that, first tokens were off by 73 % (Qwen3.5,
  B200), 69 % (DeepSeek-R1, SGLang, B200), 78 and 60 % (DeepSeek-R1 and gpt-oss-120b, attention data-parallel), with it and
  nothing else by 50, 39, 53 and 25 %. Rows that state them (`scheduler_recv_interval`, `max_num_batched_tokens`,
  `max_num_seqs`, `kv_cache`) are predicted with what they state. Left as by default: `batch_wait_timeout_iters`, and what the
  benchmark's scripts of 2026-08 state (SemiAnalysisAI/InferenceX @843c6254): chunks of 16,384 and 32,768 tokens change first
  tokens by less than a point, limits of 128 and 256 requests would have 512 clients queue for minutes, which they did not.
- **Prompts in graphs**: SGLang of today replays prompts of up to a chunk piece by piece (sgl-project/sglang pull request 16331), which is
  not described: one prompt of 1,024 tokens of DeepSeek-R1 takes 71 and 77 ms on B300 with 0.5.12, predicted 62 by launches. Of 8,192
  tokens in 8 bits it takes 288 ms where kernels by themselves add up to 165; in nvfp4 on four GPUs 188, predicted 158.
- **Launches of SGLang**: the two published measurements are of different releases and machines, 46 us each in 2025 and 31 with 0.5.14;
  from 0.5.10 on the second is taken. Qwen3.5 with 0.5.10 would agree with the first, next to the interval above.
- **Kernels compiled while requests wait**: DeepSeek-R1 in nvfp4 with SGLang of an unstated release on B200 lists first tokens of
  7 to 9 s whatever the load, SGLang 0.5.10 on B300 tokens of 12 to 180 ms.
- **Speculative decoding that is not stated** is the largest term of what is left with SGLang and TensorRT-LLM on B200. The source of
  these points says in its changelog which releases it ran so: DeepSeek-R1 on B200 with TensorRT-LLM 1.2.0rc6.post3 with drafted tokens
  alone (three a step, one next to attention data-parallel), 1.2.0rc6.post2 without, 1.1.0rc2.post2 both; SGLang's 0.5.9 in 8 bits
  both (SemiAnalysisAI/InferenceX @843c6254, perf-changelog.yaml; its scripts of 2026-02). Tokens of 1.2.0rc6.post3 are predicted 56 % late (88
  points), of 1.1.0rc2.post2 36 % (40), of the others 5 % off in the median and 8 in the mean (68); all joint points but those of
  1.2.0rc6.post3 7.4 and 12.6 %. Of 26 configurations that both were measured with, 1.2.0rc6.post3 takes 1/1.2 to 1/2.3 of a token's time of
  1.2.0rc6.post2, most with few clients and short prompts (4 clients, answers of 8,192 tokens: 4.4 and 10.1 ms) and least with many or long
  ones, as drafted tokens do; of the same 26, 1.2.0rc6.post2 is predicted 6 % off in the median. How many drafted tokens were right no source says. Qwen3.5 in 8 bits on four
  GPUs has sooner tokens than on eight. A step then brings two or three tokens, and what waits for steps waits so much longer:
  first tokens of Qwen3.5 come 45 times a token late where 15 steps are waited for, and with attention data-parallel 70 to 100
  times where it is 30. Where it is stated (InferenceX) points are skipped.
- **Clients that ask in step**: Llama 3.1 8B with TensorRT-LLM 1.0 on H100 waits, with up to 32 clients and whatever the degree,
  as long as an answer takes over the number of clients, as if one place fewer than clients were served: that, a prompt's own time and 50
  ms are off by 8 % in the median and 12 % in the mean of 108 points, the simulation by 44 %. A request that fills CUDA graphs up
  may hold the place (NVIDIA/TensorRT-LLM pull request 7998 reserves one more for it, later); Qwen3 235B with the same release does
  not wait so, and no row says which limits or padding were set. With 128 clients
  on four and eight GPUs no more than 9,200 tokens a second leave the server: its process that sends them takes 108 us for each,
  and first tokens wait for it, 1 to 2 s. Exact lengths let all clients of a closed loop ask at once for ever, lengths that vary a
  little do not; most sources do not say which.
- **Limits of an offline run**: `trtllm-bench` chooses how many requests and tokens a step has by an estimate of its own, which
  knows no latent attention (64 requests a rank of DeepSeek-R1 with answers of 8,192 tokens, where the cache has room for 130), and
  does not cut prompts, so that a step has room for a whole one (`planner/validate/offline_benchmark.py`). With that and the
  requests that its makers send, throughput of TensorRT-LLM 1.x went from 24 to 16 % (mean 27 to 19 %), of prompts of 32,768
  tokens from -60 % to within 25 %, of DeepSeek-R1 on H200 from 56 to 42 %: with 375 requests a rank it is 37 % too high, with
  64 requests 4 %.
- **DeepSeek-R1 in nvfp4 and on B200**: with SGLang 0.5.9, of whose points in 8 bits some are sooner by what drafted tokens bring, the others'
  tokens are within 6 % up to 64 clients; in nvfp4 between 7 % early and 8 % late. The measured GPU's idle time between steps is one figure of one request (0.24 ms, or 2 ms a year before).
- **Narrow experts**: Qwen3.5's 512 experts cut over four GPUs take 123 us of 64 tokens in nvfp4 by themselves where loads are skewed (SGLang
  0.5.14 on B200, ai-dynamo/aiconfigurator 0.12), priced 74: 2.9 ms a step of what B300's points are early by (3.4 ms with 64 clients).
  Refuted as a cause of its own: a time for each expert with rows, 0.05 to 0.3 us by the tables, which describes them a little
  better (SGLang's nvfp4 on B200 within 16 % in the mean, 19 without) and, fitted so to all tables of Blackwell, took gpt-oss-120b from 4 to 6
  and 5 to 8 % and left Qwen3.5 at 15 %. The rest is how many
  experts a skewed router meets.
- **Kernels of experts** are priced from tables of kernels by themselves where there are some (`simulator/serving/expert_kernels.toml`).
  Not taken are SGLang's in 16 bits on Blackwell. First tokens of gpt-oss-120b with vLLM are early by 8 %, by 20 to 40 % with 32 clients and more: prompts of
  all clients are tokenized one after the other, which is not counted.
  Throughput of gpt-oss-120b on H200 is 23 % too high with the kernels in Triton that its router loads unevenly. In nvfp4 with
  attention of its own on each rank TensorRT-LLM takes Cutlass', which are half as fast as its own: throughput of Qwen3 235B on
  B200 went from 21 to 3 %.
- **Offline throughput of small networks**: gpt-oss-20b on B200 writes 53,800 tokens a second, one each 19 us, where the host alone is
  counted with 20 to 38 us a sequence: what answers cost a server that sends them is not what they cost a run that keeps them.
- **Prefix caches**: 8-bit Llama 3.1 8B with vLLM on H200 is listed with prompts read at more than what 80 % of the GPU's peak
  would allow.
- **Separated engines' first tokens** are sent by the engine that writes: they wait for the prompt, its cache's way and a place there.
  Places are few: NVIDIA's recipes give each rank that writes as many as its clients fill, a power of two or, from 48 on, half more
  (`batch8` in a recipe's name; 105 of 141 recipes, `planner/validate/makers_settings.py`), so that a few clients more than places wait for
  a whole answer. Six clients of three engines with a place each (H100) wait 12.7 s in the median, which is an answer; 30 with 24 places
  5.0 s in the mean, predicted 4.7; nine with seven (H200) 3.0 and 2.7. And engines get requests in turn, as Dynamo's frontend routes by
  default, not the least loaded one first: of nine clients with seven places half wait, 1.65 s in the median, predicted 1.63, where the
  least loaded first would give 0.36. No recipe has more than 1,024 on a rank: 16,384
  clients of 8,192 places wait 135 s in the mean, predicted 134, with a token each 146 ms, predicted 148. What is left: recipes with other numbers of places, prompts read by TensorRT-LLM in 8 bits on B300, and SGLang's first tokens
  on H200, which with 32 clients and more take 0.4 to 0.55 s longer than predicted whatever the load and the length, and first transfers between each two engines. Refuted: a `stream_interval` of 20 or 100 tokens, which the time between chunks shows, does
  not delay first tokens (72 clients on H200: 0.22 s, 100 tokens 1.5 s), nor do SGLang's 10 on H200: of 921.9 tokens the first comes
  alone, since 92.5 chunks follow. Nor does what its source states (decode.py and prefill.py of sgl-project/sglang
  python/sglang/srt/disaggregation): the engine that writes makes room, and later sees that the cache has come, between two of its
  steps (`disaggregation_decode_polling_interval` is 1), and passes the prompt engine's token on with the next one, one to two steps in
  all, where one and a half are predicted, 16 to 38 ms each. Steps of 32,768 tokens, as NVIDIA's recipe for 64 answers on two and three
  engines sets them (NVIDIA/srt-slurm recipes/h200/8k1k/bs64-2p3d.yaml), change predicted medians by 3 % at most where no queue grows. It is no part of
  the release: on H100, 0.5.8 adds 45 ms from 8 to 32 clients. And engines that do both wait as long: 0.68 to 0.78 s with
  64 clients and prompts of 8,192 tokens on H200, predicted 0.40, which is the time of two prompts instead of one. SGLang's router, besides, passes
  nothing on until the engine that reads has answered, between two of its batches (sgl-project/sglang issue 22853: 0.2 s with prompts of
  12,000 tokens), which is not described. Their source counts output by the GPUs that write and all tokens by all GPUs, so
  throughput by all GPUs is taken from the second: errors went from 25 to 17 %.
- **Wide expert parallel**: DeepSeek-R1 on 48 GPUs of GB200 NVL72 with SGLang, 32 experts held twice, writes 13,386 tokens a second
  and GPU in nvfp4 with an 8-bit cache (1,408 answers a GPU) and 9,087 in 8 bits with a 16-bit one (768): predicted 16,150 and 8,940,
  with two batches 19,280 and 9,420. With attention's output in 16 bits, as in the nvfp4 checkpoint that guides named by then, the first
  is 14,420; which one ran is not stated. On 72 H100 it writes 2,785 with two batches, predicted 2,160 (LMSYS, 2025-09-25 and 2025-05-05;
  `tests/simulator/serving/test_forward_pass.py`). Prompts of 2,000 tokens: 26,156 and 18,471 a second and GPU on GB200, predicted
  25,500 and 14,140 with 32,768 tokens a step on four GPUs; of 4,000 on 32 H100 6,540, predicted 6,620 with two batches, a node
  being sent a token once, whose ranks pass it on. None of these figures was fitted; experts, attention's format and 16-bit products
  were priced anew from tables and checkpoints after prompts had been seen to be a third too slow.
- **Releases**: vLLM of 2024 takes 0.1 ms of its host for each answer of a step (vllm-project/vllm issue 6913), which explains it on H100
  and GH200. With several GPUs its driver's process sends each step's inputs to those of the others: Llama 3.1 8B on two A100 took
  2.30 s for eight answers of 256 tokens (vllm-project/vllm pull request 9856), which is 0.8 ms a step more than kernels and the host of one GPU.
- **A100 without a memory** is read as the card of 40 GB, with three quarters of the other's rate: so clouds call it (nvidia-tesla-a100 and
  nvidia-a100-80gb; ND and NDm A100 v4), and the jobs of the source that says so (argonne-lcf/LLM-Inference-Bench @4211f5d4, vLLM/A100) mount the
  file systems of a machine with such cards. One answer at a time of Llama 2 7B is then 0 to 2 % off with TensorRT-LLM. A batch of TensorRT-LLM
  in two and four stages is still 14 to 112 % too quick: it takes as long as if parts of it passed the stages one after the other. Left
  with TensorRT-LLM on A100: networks of few key heads, on one GPU 4 to 8 % too quick with 128 and 256 tokens, 11 to 23 with 2,048, and four GPUs
  with one answer, 16 to 33 %; tables of kernels there (1.0) are no slower than priced, but read from the cache. DeepSpeed-MII is scheduled as vLLM.
- **Several GPUs** cost a step of TensorRT-LLM 1.0 about 0.5 ms whether they are two, four or eight: of Llama 3.1 8B a step is 0.3 ms
  late on one GPU and 0.8 on more (144 points, the part that is neither of prompts nor of answers). It sends new requests to all ranks
  before each step (NVIDIA/TensorRT-LLM issue 5927, pull request 13412); how long that takes nobody states, so it is not priced.

"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("points", nargs="+")
    parser.add_argument("--out", required=True)
    parser.add_argument("--against", type=Path, help="the table of tests/bench/against_aiconfigurator.py")
    parser.add_argument("--vidur", type=Path, help="the table of tests/bench/against_vidur.py")
    options = parser.parse_args()
    points = [data for name in options.points for data in read_points(name)]
    rows = [
        validate_point(data) | {"engine": engine_named(str(data.get("backend") or ""), str(data.get("date") or ""))}
        for data in points
    ]
    known = [row for row in rows if not row["skipped"]]
    names = " ".join(Path(name).name for name in options.points)
    lines = [
        TEXT,
        f"{datetime.now(UTC):%Y-%m-%d}: `planner validate {names}`, {len(rows)} points, {len(known)} predicted.",
    ]
    lines += ["", "## By source, GPU, model and engine", "", HEADING, RULE]
    lines += [_line(name, part) for name, part in by_group(known)]
    lines += [
        _line("**all**", summarise_points(known)),
        "",
        "Median (mean) of absolute errors, predicted/measured - 1.",
        "",
    ]
    lines += [PERCENTILES, *_percentiles(known), ""]
    lines += [
        RANKING,
        *ranking_lines([(raw, row) for raw, row in zip(points, rows, strict=True) if not row["skipped"]]),
    ]
    if options.against:
        lines += [AGAINST, options.against.read_text()]
    if options.vidur:
        lines += [VIDUR, options.vidur.read_text()]
    lines += [
        "## Ranges",
        "",
        "| engine | quantity | points | spread | held, group left out |",
        "|---|---|--:|--:|--:|",
    ]
    lines += list(_spreads(known))
    lines += ["", "## Skipped", "", *_skipped(rows)]
    Path(options.out).write_text("\n".join(lines) + "\n")


PERCENTILES = """## Percentiles

Of points that state them, by their sources' names: median (mean) of absolute errors.

| source, GPU, model, engine | percentile | points | error |
|---|---|--:|--:|"""
RANKING = """## Ranking

Loads with several configurations: points that share source, GPU, model, engine with its release, precision, lengths and clients
(of a static batch: sequences) a GPU. The configuration predicted to be best, against the best measured; "any choice" is the mean
of all configurations.
"""
AGAINST = """## Compared with aiconfigurator

Points that both answer, up to twelve of a group by chance (`tests/bench/against_aiconfigurator.py --each 12`, 2026-12-01), engines
that read and write together. aiconfigurator is 0.12.0 with its newest table of each engine. These points are of the samples
that both tools were made with.

So compared, aiconfigurator is ahead in tokens of two groups, and nowhere in first tokens: of Qwen3 235B with TensorRT-LLM 1.0, whose
lengths are taken to vary where the benchmark of its makers sends them all alike (above), and by four points of DeepSeek-R1 with SGLang
on B300 in nvfp4. There a layer's two sums with their norms take 21 us on four GPUs as on the eight that they are known of, where
TensorRT-LLM's take 11; they are launched before the kernel before them has ended (sgl-project/sglang pull request 23765: almost
all of it hidden for one request), which is not priced since nobody says by how much. From 0.5.10 to 0.5.12 a token of four clients
became 13 us a layer quicker in 4 as in 8 bits. Of Qwen3.5
with SGLang on B300 both are off by as much.
"""
VIDUR = """
## Compared with vidur, aiconfigurator and llm-optimizer by others

Runs of vLLM 0.15.1 on H100 that the makers of another simulator measured, with what they had three tools predict
(inference-sim/sim-to-real-accuracy-validation @dcec3fd, results_trainval/error_records.csv; the requests of these runs:
inference-sim/inference-sim @f90a1e3, testdata/roofline_goldendataset.json), next to ours
(`tests/bench/against_vidur.py`). A point is a rate of requests for ten or twenty minutes. Nothing here was fitted to them. "Ours" were
given what others were: of prompts the system prompt, a tenth to a fifth, is cached. The load has 23 to 50 prompts that it sends over
and over (kubernetes-sigs/inference-perf, shared_prefix_datagen.py: prompts are taken modulo their number), and vLLM keeps them:
"prompts cached" counts each prompt but its last block as cached, which explains first tokens of the dense models within 3 to 23 %. Not stated is
whether earlier turns were sent as well, as the load's `enable_multi_turn_chat` would have it. Scout's tokens are early by 30
to 40 %.

vidur answers three of these points, Llama 2 7B, with the measured lengths of each request, and is nearer: 16 against
20 % in tokens, 15 against 40 in first tokens (20 with prompts cached). Its other published points, about nine of 49 runs, are in files that
the source does not have. vidur itself was not run: its package (0.0.26)
has no profiles, and the tables of attention of its repository (microsoft/vidur @7d47513, data/profiling/compute/*/attention.csv)
are files of 10 to 17 MB that the copy at hand leaves out.

"""
HEADING = "| source, GPU, model, engine | points | first token | a token | throughput |"
RULE = "|---|--:|--:|--:|--:|"


def _percentiles(rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        for name, error in row["tails"].items():
            found.setdefault((row["group"], name), []).append(abs(error))
    for (group, name), errors in sorted(found.items()):
        cells = (group.replace(" | ", ", "), name, str(len(errors)), f"{median(errors):.0%} ({fmean(errors):.0%})")
        yield f"| {' | '.join(cells)} |"


def _line(name: str, part: Mapping[str, Any]) -> str:
    cells = ["-" if part[q] is None else f"{part[q]['median_abs']:.0%} ({part[q]['mean_abs']:.0%})" for q in QUANTITIES]
    return f"| {name.replace(' | ', ', ')} | {part['rows']} | {' | '.join(cells)} |"


def _spreads(rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    for engine in sorted({row["engine"] for row in rows}):
        for quantity in QUANTITIES:
            of = [
                (row["group"], abs(math.log1p(row["error"][quantity])))
                for row in rows
                if row["engine"] == engine and row["error"][quantity] is not None
            ]
            if not of:
                continue
            held = 0
            for group in {name for name, _ in of}:
                others = [error for name, error in of if name != group]
                limit = _quantile(others) if others else math.inf
                held += sum(error <= limit for name, error in of if name == group)
            spread = math.expm1(_quantile([error for _, error in of]))
            yield f"| {engine} | {quantity} | {len(of)} | {spread:.2g} | {held / len(of):.0%} |"


def _quantile(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(HELD * len(values)))]


def _skipped(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    reasons: dict[str, int] = {}
    for row in rows:
        if row["skipped"]:
            reasons[row["skipped"]] = reasons.get(row["skipped"], 0) + 1
    return [f"- {count}: {reason}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1])]


if __name__ == "__main__":
    main()
