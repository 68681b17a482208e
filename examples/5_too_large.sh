#!/bin/sh
# A question without an answer ends with 3 and says what is missing and what would help.
planner suggest --model llama3-405b --cluster dgx-h100 --gpus 8
test $? -eq 3
